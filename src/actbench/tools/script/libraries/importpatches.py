"""Patches libraries when a script imports them; a library that it never imports is not imported."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from actbench.device.patches import attribute
from actbench.errors import is_users

Change = Callable[[ModuleType], AbstractContextManager[object]]
"""Returns, for a module that was just imported, a context in which it is changed."""

Make = Callable[[], ModuleType]
"""Makes a stub for a module."""

_Identity = int | tuple[int, int]


@contextmanager
def changed(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the block, replace an attribute of a module or class, if it exists, by what ``make`` returns for it.

    A class method or a static method comes to ``make`` as the plain function, and stays one.
    """
    missing = object()
    own = inspect.getattr_static(owner, name, missing)
    if own is missing:
        yield
        return
    of_class = isinstance(own, classmethod | staticmethod)
    with attribute(owner, name, type(own)(_like(own.__func__, make)) if of_class else _like(own, make)):
        yield


def combined(changes: Sequence[Change]) -> Change:
    """Return several changes of one module as one."""

    def change(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            for each in changes:
                stack.enter_context(each(module))
            return stack.pop_all()

    return change


@contextmanager
def rebind(owner: ModuleType, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the block, replace a function of a module, and its copies in other modules.

    Modules that copy it inside the block have the function itself again after it. A copy that no module holds, such as
    one in a closure, goes on to call the function itself.
    """
    own = getattr(owner, name, None)
    if own is None:
        yield
        return
    replacements: list[Callable[..., Any]] = [make(own)]

    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacements[-1] if replacements else own)(*args, **kwargs)

    replacement = functools.update_wrapper(call, own)
    if getattr(owner.__spec__, "_initializing", False):  # no module could copy from one that is being imported
        vars(owner)[name] = replacement
    else:
        (_searched.get() or _Copies()).replace(own, replacement)
    try:
        yield
    finally:
        replacements.clear()
        (_searched.get() or _Copies()).replace(replacement, own)


@contextmanager
def searched_once() -> Iterator[None]:
    """Inside the block, search the modules once for the copies of all functions that are rebound and restored."""
    token = _searched.set(_Copies())
    try:
        yield
    finally:
        _searched.reset(token)


class _Copies:
    """Where functions stand in modules: what modules gain after the search is searched too.

    What a module holds is a set of numbers, in which no garbage is searched: modules hold 100,000s of things.
    """

    def __init__(self) -> None:
        self._last: tuple[int, str] | None = None
        self._names: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._held: list[set[_Identity]] = []

    def replace(self, function: Any, replacement: Any) -> None:
        """Replace a function, and all its copies."""
        self._search()
        wanted = _identity(function)
        for i in [i for i, held in enumerate(self._held) if wanted in held]:
            names = self._names[i]
            self._held[i].add(_identity(replacement))
            for key in [key for key, value in names.items() if _identity(value) == wanted]:
                names[key] = replacement

    def _search(self) -> None:
        last = len(sys.modules), next(reversed(sys.modules))  # an import puts its module at the end
        if last != self._last:
            known = {id(names): i for i, names in enumerate(self._names)}
            found = [vars(each) for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
            places = [known.get(id(names)) for names in found]
            self._sizes = [-1 if i is None else self._sizes[i] for i in places]
            self._held = [set() if i is None else self._held[i] for i in places]
            self._last, self._names = last, found
        sizes = list(map(len, self._names))
        if sizes != self._sizes:
            for i, names in enumerate(self._names):
                if sizes[i] != self._sizes[i]:
                    values = list(names.values())
                    self._held[i] = {
                        *map(id, values),
                        *(_identity(each) for each in values if type(each) is MethodType),
                    }
            self._sizes = sizes


_searched: ContextVar[_Copies | None] = ContextVar("_searched", default=None)


def _identity(value: Any) -> _Identity:
    """Return what tells a function from others; each copy of a bound method may be an object of its own."""
    return (id(value.__self__), id(value.__func__)) if type(value) is MethodType else id(value)


def _like(own: Any, make: Callable[[Any], Any]) -> Any:
    """Return what is made for ``own``, with its name and signature, which Lightning and others read."""
    made = make(own)
    return functools.update_wrapper(made, own) if inspect.isfunction(made) else made


def is_users_import() -> bool:
    """Return whether the import that runs now stands in a file of the user's, and not in a library."""
    frame = sys._getframe(1)
    while frame is not None and _is_passing(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and is_users(frame.f_code.co_filename)


def _is_passing(file: str) -> bool:
    """Return whether imports pass through a file on their way: it is Python's own, or ours."""
    of_python = file.startswith("<frozen importlib") or file == importlib.__file__
    return of_python or Path(file).is_relative_to(Path(__file__).parents[1])


@contextmanager
def patch_on_import(
    changes: Mapping[str, Change], stubs: Mapping[str, Make], told: Callable[[str], None]
) -> Iterator[None]:
    """Patch modules once they are imported inside the block, and import stubs in place of some.

    Modules that were imported before are changed at once. All changes are taken back at the end.

    Args:
        changes: By the full name of a module.
        stubs: By the name of a package; each module below it is made too. A library that only asks whether the
            package is installed gets the true answer.
        told: Called with the name of each package whose stub is imported.
    """
    with ExitStack() as stack:
        finder = _Finder(changes, stubs, stack, told)
        for name, change in changes.items():
            if name in sys.modules:
                stack.enter_context(change(sys.modules[name]))
        away = {name: module for name, module in sys.modules.items() if finder.stubbed_package(name)}
        for name in away:
            del sys.modules[name]
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if finder.stubbed_package(name)]:
                del sys.modules[name]
            sys.modules.update(away)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the finders behind it do, and adds the change of a module to its loader."""

    def __init__(
        self,
        changes: Mapping[str, Change],
        stubs: Mapping[str, Make],
        stack: ExitStack,
        told: Callable[[str], None],
    ) -> None:
        self._changes, self._stubs, self._stack, self._told = changes, stubs, stack, told

    def stubbed_package(self, name: str) -> str | None:
        """Return the package among the stand-ins that a module is or belongs to, or None."""
        if not name.startswith(tuple(self._stubs)):  # which is so for thousands
            return None
        return next((each for each in self._stubs if name == each or name.startswith(f"{each}.")), None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of a module to change or to stand in for; None leaves it to the others."""
        package = self.stubbed_package(fullname)
        if package is not None:
            if sys._getframe(2).f_code.co_name == "find_spec":  # importlib.util asks: is it installed?
                return None
            if fullname == package:
                self._told(package)
            loader = _StubLoader(self._stubs[package])
            return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
        if fullname not in self._changes:
            return None
        found = next((spec for spec in self._others(fullname, path, target) if spec is not None), None)
        if found is not None and found.loader is not None:
            found.loader = _Changing(found.loader, self._changes[fullname], self._stack)
        return found

    def _others(self, *asked: Any) -> Iterator[importlib.machinery.ModuleSpec | None]:
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another of this class may stand before it
        yield from (finder.find_spec(*asked) for finder in behind)


class _StubLoader(importlib.abc.Loader):
    def __init__(self, make: Make) -> None:
        self._make = make

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made = self._make()
        made.__name__ = spec.name
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is whole when it is made."""


class _Changing(importlib.abc.Loader):
    """Loads a module as its own loader does, and then changes it."""

    def __init__(self, own: Any, change: Change, stack: ExitStack) -> None:
        self._own, self._change, self._stack = own, change, stack

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own  # so that tools that read the source find it
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._stack.enter_context(self._change(module))
