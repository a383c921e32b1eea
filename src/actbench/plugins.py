"""What installed packages add to actbench: objects that entry points name, found without importing them.

The groups are ``actbench.schemes``, ``.workloads``, ``.meters``, ``.kinds``, ``.exports``, ``.commands`` and
``.executors``. What actbench itself ships comes in by the same entry points.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from actbench.errors import told

Group = Literal["schemes", "workloads", "meters", "kinds", "exports", "commands", "executors"]

OURS = "actbench"


class PluginWarning(UserWarning):
    """A plug-in cannot be used; actbench goes on without it."""


@dataclass(frozen=True)
class Plugin:
    """One object that an installed package adds.

    Attributes:
        name: What users call it.
        package: The package that brings it, with its version, such as ``actbench 0.1.0``.
        entry: Its entry point.
    """

    name: str
    package: str
    entry: EntryPoint

    @property
    def is_ours(self) -> bool:
        """Whether actbench ships it."""
        return self.package.split()[0] == OURS

    def source(self) -> Path | None:
        """Return the file of its module, found without importing anything; None if there is no such file."""
        package, *inside = self.entry.module.split(".")
        try:
            found = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            return None
        if found is None or found.origin is None:
            return None
        if not inside:
            return Path(found.origin)
        path = Path(found.origin).parent.joinpath(*inside)
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((file for file in files if file.is_file()), None)

    def load(self) -> Any:
        """Import and return the object.

        Raises:
            Exception: Whatever importing its module raises.
        """
        return self.entry.load()


@functools.cache
def installed(group: Group) -> dict[str, Plugin]:
    """Return the plug-ins of a group by name, in order of their names.

    If two packages bring one name, that of actbench counts, or else the first by the package's name; the other is
    warned of.
    """
    found: dict[str, Plugin] = {}
    every = [_plugin(entry) for entry in entry_points(group=f"{OURS}.{group}")]
    for plugin in sorted(every, key=lambda plugin: (plugin.name, not plugin.is_ours, plugin.package)):
        first = found.setdefault(plugin.name, plugin)
        if first.package != plugin.package:
            _warn(plugin, group, f"{first.package} brings one of that name too, which is used")
    return found


def loaded(group: Group) -> dict[str, Any]:
    """Return the objects of a group by name; what cannot be imported is warned of and left out."""
    found = {}
    for name, plugin in installed(group).items():
        try:
            found[name] = plugin.load()
        except Exception as error:  # a stranger's module may raise anything
            _warn(plugin, group, f"it cannot be imported: {told(error)}")
    return found


def _plugin(entry: EntryPoint) -> Plugin:
    package = entry.dist
    return Plugin(entry.name, f"{package.name} {package.version}" if package is not None else OURS, entry)


def _warn(plugin: Plugin, group: Group, why: str) -> None:
    text = f"plug-in {plugin.name!r} ({group}) of {plugin.package} is left out: {why}"
    warnings.warn(PluginWarning(text), stacklevel=3)
