"""Which activation functions the code of a module calls, as far as its bytecode says.

Nothing is run. A name is followed from the globals, the closure or the module itself to what it stands for: a function
of torch, a table of these, or a function or method of the model's own, which is read in turn. Of a method whose object
nobody knows (``x.relu()``) the name is taken for that of a tensor's. What hides behind more than that (``getattr`` of a
name put together, a function that is given as an argument) is not found.
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

from actbench.nn.called.functions import ALIASES, FUNCTIONS, METHODS
from actbench.nn.forwardwrapper import ReboundForward

_UNKNOWN = object()
_SELF = "self"
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "functools")
_NEUTRAL = ("CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "RESUME")
_TABLES = (dict, OrderedDict, list, tuple)  # and no subclass: one may import or make its entries as they are asked for
_LONGEST = 256  # entries of a table that is looked through


def functions_called(module: nn.Module) -> tuple[Any, ...]:
    """Return the functions of :data:`~actbench.nn.called.functions.FUNCTIONS` that the code of a forward calls.

    Those of the modules inside are theirs.
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
        if bound is None or isinstance(bound, ReboundForward):
            self._method(module, "forward")
        else:
            self._value(bound, module)

    def _method(self, module: nn.Module, name: str) -> bool:
        """Read every definition of a method by the classes of a module, and say whether there is one."""
        found = False
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
        """Take note of what a name stands for."""
        if type(value) in _TABLES:
            if len(value) > _LONGEST:
                return
            for entry in value.values() if isinstance(value, dict) else value:
                self._note(entry)  # and no more: of a table of losses one is called, or none
        elif isinstance(value, functools.partial):
            self._value(value.func, module)
        elif isinstance(value, MethodType):
            self._value(value.__func__, module)
        elif not self._note(value) and isinstance(value, FunctionType) and not _is_of_library(value):
            self._function(value, module)

    def _note(self, value: Any) -> bool:
        """Note a value that is one of the functions, and say whether it is."""
        try:
            found = ALIASES.get(value, value)
            if found not in FUNCTIONS:
                return False
        except TypeError:  # of no hash
            return False
        self.found[found] = None
        return True

    def _function(self, function: FunctionType, module: nn.Module) -> None:
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
        for instruction in dis.get_instructions(code):
            operation, argument = instruction.opname, instruction.argval
            if operation in _NEUTRAL:
                continue
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
                    continue  # from the arguments of super() to its attribute
                value = _UNKNOWN
            value = self._noted(value, module)

    def _noted(self, value: Any, module: nn.Module) -> Any:
        """Return a value that was read, once what it calls is noted."""
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
                return _UNKNOWN
            return vars(value).get(name, value._modules.get(name, _UNKNOWN))
        if isinstance(value, ModuleType | type):
            return getattr(value, name, _UNKNOWN)
        return getattr(value, "__dict__", {}).get(name, _UNKNOWN)


class _Super:
    """Stands for ``super()``."""


def _is_of_library(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _LIBRARIES


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing was put there yet
            yield _UNKNOWN
