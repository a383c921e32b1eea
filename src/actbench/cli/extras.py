"""The extras of actbench and of plug-ins: optional packages, what each is for, and which of them are installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from actbench import plugins
from actbench.machine import CUPY, version_of
from actbench.plugins import OURS, Group

OWN = {
    "cuda": "kernels of actbench's own on a GPU",
    "distributed": "the Trainer of transformers",
    "lightning": "the callback for Lightning",
}
"""What the extras are for that no plug-in declares."""


class Extra(NamedTuple):
    """One extra of a package; ``versions`` are those of the packages it brings, None for what is not installed."""

    package: str
    name: str
    purpose: str
    versions: dict[str, str | None]

    @property
    def is_installed(self) -> bool:
        """Whether all of its packages are installed."""
        return None not in self.versions.values()

    @property
    def requirement(self) -> str:
        """The requirement by which pip installs the extra: ``actbench[peft]``."""
        return f"{self.package}[{self.name}]"


def extras() -> Iterator[Extra]:
    """Yield the extras that a user may install, by package, in the order of the package's ``pyproject.toml``.

    An extra that neither ``OWN`` nor a plug-in has is for the development of its package, and left out.
    """
    purposes = {(OURS, name): [purpose] for name, purpose in OWN.items()}
    for (package, name, purpose, group), users in _declared().items():
        noun = group if len(users) > 1 else group.removesuffix("s")
        names = " and ".join(filter(None, (", ".join(users[:-1]), users[-1])))
        purposes.setdefault((package, name), []).append(f"{noun} {names}: {purpose}")
    for package in dict.fromkeys(package for package, _ in purposes):
        for name in importlib.metadata.metadata(package).get_all("Provides-Extra") or ():
            if found := purposes.get((package, name)):
                yield Extra(package, name, "; ".join(found), _versions(package, name))


def _declared() -> dict[tuple[str, str, str, Group], list[str]]:
    """Return the plug-ins that need an extra, by its package and name, what they need it for, and their group."""
    users: dict[tuple[str, str, str, Group], list[str]] = {}
    for group in get_args(Group):
        for plugin in plugins.installed(group).values():
            if plugins.fault(plugin, object) is None:
                for name, purpose in declared_by(plugin.load()).items():
                    users.setdefault((plugin.package.split()[0], name, purpose, group), []).append(plugin.name)
    return users


def declared_by(plugin: Any) -> dict[str, str]:
    """Return the extras that the object of an entry point needs, each with its purpose; a scheme's card has them."""
    return dict(getattr(getattr(plugin, "card", plugin), "extras", {}))


def _versions(package: str, extra: str) -> dict[str, str | None]:
    wanted = importlib.metadata.requires(package) or []
    needed = [re.split(r"[^\w.-]", each)[0] for each in wanted if re.search(rf"""extra == ['"]{extra}['"]""", each)]
    if (package, extra) == (OURS, "cuda"):  # the CuPy of another CUDA version does as well
        needed = [next(filter(version_of, CUPY), CUPY[0])]
    return {each: version_of(each) for each in needed}
