"""Finds the activation functions that the code of a module calls, by its bytecode.

Nothing is run. A name is followed from the globals, the closure or the module itself to its value: a function of torch,
a table of these, or a function or method of the model's own, which is read in turn. A method of an unknown object
(``x.relu()``) is taken for a tensor's method. Anything more hidden (``getattr`` of a composed name, a function that is
passed as an argument) is not found.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from actbench.methods.fewbit.called.functions import ALIASES, FUNCTIONS, METHODS
from actbench.packing.forwardwrapper import ReboundForward

_UNKNOWN = object()
_SELF = "self"
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "functools")
_NEUTRAL = ("CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "RESUME")
_TABLES = (dict, OrderedDict, list, tuple)  # and no subclass: it may import or make its entries on access
_LONGEST = 256  # the most entries of a table that is searched


def functions_called(module: nn.Module) -> tuple[Any, ...]:
    """Return the functions of :data:`~actbench.methods.fewbit.called.functions.FUNCTIONS` that the code of a forward
    calls.

    Calls by the modules inside it are not included.
    """
    reader = _Reader()
    reader.forward(module)
    return tuple(reader.found)


class _Reader:
    """Reads functions, each once."""

    def __init__(self) -> None:
        self.found: dict[Any, None] = {}
        self._seen: set[tuple[CodeType, int]] = set()

    def forward(self, module: nn.Module) -> None:
        bound = vars(module).get("forward")
        # what we have bound calls the code of the class, which is what is to be read
        if bound is None or isinstance(bound, ReboundForward):
            self._method(module, "forward")
        else:
            self._value(bound, module)

    def _method(self, module: nn.Module, name: str) -> bool:
        """Read every definition of a method by the classes of a module, and return whether there is one."""
        found = False
        # all definitions, since one may call that of its base
        for cls in type(module).__mro__:
            if cls is nn.Module:
                break
            defined = vars(cls).get(name)
            if isinstance(defined, property):
                defined = defined.fget
            if isinstance(defined, staticmethod | classmethod):
                defined = defined.__func__
            if isinstance(defined, FunctionType):
                self._function(defined, module)
                found = True
        return found

    def _value(self, value: Any, module: nn.Module) -> None:
        """Note the value of a name, or read it if it is a function."""
        if type(value) in _TABLES:
            if len(value) > _LONGEST:
                return
            for entry in value.values() if isinstance(value, dict) else value:
                self._note(entry)  # but read none: of a table of losses one is called, or none
        elif isinstance(value, functools.partial):
            self._value(value.func, module)
        elif isinstance(value, MethodType):
            self._value(value.__func__, module)
        elif not self._note(value) and isinstance(value, FunctionType) and not _is_of_library(value):
            self._function(value, module)

    def _note(self, value: Any) -> bool:
        """Note a value if it is one of the functions, and return whether it is."""
        try:
            found = ALIASES.get(value, value)
            if found not in FUNCTIONS:
                return False
        except TypeError:  # not hashable
            return False
        self.found[found] = None
        return True

    def _function(self, function: FunctionType, module: nn.Module) -> None:
        # a decorator may call functions too, so that both are read
        unwrapped = inspect.unwrap(function)
        for each in dict.fromkeys((function, unwrapped)):
            if isinstance(each, FunctionType):
                closure = dict(zip(each.__code__.co_freevars, _contents(each), strict=True))
                self._code(each.__code__, each.__globals__, closure, module)

    def _code(self, code: CodeType, names: dict[str, Any], closure: dict[str, Any], module: nn.Module) -> None:
        if (code, id(module)) in self._seen:
            return
        self._seen.add((code, id(module)))
        value: Any = _UNKNOWN
        for operation, argument in _instructions(code):
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = names.get(argument, _UNKNOWN)
            elif operation.startswith(("LOAD_FAST", "LOAD_DEREF")):
                name = argument[-1] if isinstance(argument, tuple) else argument
                value = module if name == _SELF else closure.get(name, _UNKNOWN)
            elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
                value = self._attribute(value, argument, module)
            else:
                if operation.startswith("LOAD_SUPER"):
                    self._method(module, argument)
                elif isinstance(argument, CodeType):
                    self._code(argument, names, closure, module)
                elif isinstance(value, _Super):
                    continue  # between the arguments of super() and its attribute
                value = _UNKNOWN
            value = self._noted(value, module)

    def _noted(self, value: Any, module: nn.Module) -> Any:
        """Note what a value calls, and return the value."""
        if value is super:
            return _Super()
        if value is not _UNKNOWN and not isinstance(value, nn.Module | _Super):
            self._value(value, module)
        return value

    def _attribute(self, value: Any, name: str, module: nn.Module) -> Any:
        if isinstance(value, _Super):
            self._method(module, name)
            return _UNKNOWN
        if value is _UNKNOWN:
            return METHODS.get(name, _UNKNOWN)
        if isinstance(value, nn.Module):
            if self._method(value, name):
                # the method has been read, and its result is not known
                return _UNKNOWN
            return vars(value).get(name, value._modules.get(name, _UNKNOWN))
        if isinstance(value, ModuleType | type):
            return getattr(value, name, _UNKNOWN)
        return getattr(value, "__dict__", {}).get(name, _UNKNOWN)


@functools.cache
def _instructions(code: CodeType) -> tuple[tuple[str, Any], ...]:
    """Return the operations of some code with their arguments: each block of a model has the same code."""
    read = ((each.opname, each.argval) for each in dis.get_instructions(code))
    return tuple((operation, argument) for operation, argument in read if operation not in _NEUTRAL)


class _Super:
    """Stands for ``super()``."""


def _is_of_library(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _LIBRARIES


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is still empty
            yield _UNKNOWN
