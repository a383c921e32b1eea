"""What installed packages add to actbench: objects that entry points name, found without importing them.

The groups are ``actbench.schemes``, ``.workloads``, ``.meters``, ``.kinds``, ``.exports``, ``.commands``,
``.executors`` and ``.benches``. What actbench itself ships comes in by the same entry points.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from actbench.errors import message_of

Group = Literal["schemes", "workloads", "meters", "kinds", "exports", "commands", "executors", "benches"]

OURS = "actbench"
TOLD_BY = "ACTBENCH_PLUGINS_TOLD_BY"
"""Environment variable: the process that tells the user of plug-ins which are left out."""

STALE = (
    "the entry points of actbench are not installed as they are here, so schemes and verbs are missing: run "
    "'pip install -e .' again"
)
_ALWAYS = "actbench.schemes", "exact", "actbench.scheme.exact:Exact"

T = TypeVar("T")


class PluginWarning(UserWarning):
    """A plug-in cannot be used; actbench goes on without it."""


@dataclass(frozen=True)
class Plugin:
    """One object that an installed package adds.

    Attributes:
        name: What users call it.
        entry: Its entry point.
    """

    name: str
    entry: EntryPoint

    @property
    def package(self) -> str:
        """The package that brings it, with its version, such as ``actbench 0.1.0``."""
        return OURS if self.entry.dist is None else _package(self.entry.dist)

    @property
    def is_ours(self) -> bool:
        """Whether actbench ships it."""
        return self.package.split()[0] == OURS

    @property
    def precedence(self) -> tuple[bool, str]:
        """The order of plug-ins with one name, the first of which is used: actbench's own, then by package."""
        return not self.is_ours, self.package

    def source(self) -> Path | None:
        """Return the file of its module; see :func:`source_of`."""
        return source_of(self.entry.module)

    def load(self) -> Any:
        """Import and return the object.

        Raises:
            Exception: Whatever importing its module raises.
        """
        return self.entry.load()


def source_of(module: str) -> Path | None:
    """Return the file of a module, found without importing anything; None if there is no such file."""
    package, *inside = module.split(".")
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent.joinpath(*inside) if inside else Path(found.origin).with_suffix("")
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@functools.cache
def _entries() -> Any:  # of another type in Python 3.11 than later
    """Return the entry points of every group: reading all packages takes some milliseconds.

    Warn where those of this actbench are not among them: it runs from a folder that is not installed, or that was
    installed before it was changed.
    """
    found = entry_points()
    group, name, value = _ALWAYS
    if not any(each.value == value for each in found.select(group=group, name=name)):
        _warn(STALE)
    return found


@functools.cache
def installed(group: Group) -> dict[str, Plugin]:
    """Return the plug-ins of a group by name, in order of their names.

    If two packages bring one name, that of actbench counts, or else the first by the package's name; the other is
    warned of.
    """
    groups: dict[str, list[Plugin]] = {}
    for entry in sorted(_entries().select(group=f"{OURS}.{group}"), key=lambda entry: str(entry.name)):
        groups.setdefault(entry.name, []).append(Plugin(entry.name, entry))
    return {name: _first(plugins, group) if len(plugins) > 1 else plugins[0] for name, plugins in groups.items()}


def _first(plugins: Sequence[Plugin], group: Group) -> Plugin:
    first, *others = sorted(plugins, key=lambda plugin: plugin.precedence)
    for plugin in others:
        leave_out(plugin, group, f"{first.package} brings one of that name too, which is used")
    return first


@functools.cache
def _package(found: Distribution) -> str:
    return f"{found.name} {found.version}"  # read from a file, which takes as long as all entry points together


def loaded(group: Group, why_not: Callable[[Plugin], str | None]) -> dict[str, Any]:
    """Return the objects of a group by name, without those for which ``why_not`` returns a reason.

    These are warned of. What cannot be imported must be among them, as it is for :func:`fault`.
    """
    found = {}
    for name, plugin in installed(group).items():
        if why := why_not(plugin):
            leave_out(plugin, group, why)
        else:
            found[name] = plugin.load()
    return found


def find_plugin(group: Group, name: str, of: type[T]) -> T | None:
    """Return one object of a group; None, with a warning, if it is no ``of`` or cannot be imported."""
    plugin = installed(group).get(name)
    if plugin is None:
        return None
    if (why := fault(plugin, of)) is not None:
        leave_out(plugin, group, why)
        return None
    return cast("T", _imported(plugin)[0])


def fault(plugin: Plugin, of: type) -> str | None:
    """Return why a plug-in cannot be used as an ``of``; None if it can."""
    found, why = _imported(plugin)
    if why is None and not isinstance(found, of):
        why = f"{plugin.entry.value} is a {type(found).__name__} and no {of.__name__}"
    return why


@functools.cache
def leave_out(plugin: Plugin, group: Group, why: str) -> None:
    """Warn, once in a process, that a plug-in is left out; not in processes that a command starts, which told of it."""
    _warn(f"plug-in {plugin.name!r} ({group}) of {plugin.package} is left out: {why}")


def _warn(text: str) -> None:
    if os.environ.get(TOLD_BY, str(os.getpid())) == str(os.getpid()):
        warnings.warn(PluginWarning(text), stacklevel=3)


@functools.cache
def _imported(plugin: Plugin) -> tuple[Any, str | None]:
    try:
        return plugin.load(), None
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything
        return None, f"it cannot be imported: {message_of(error)}"
