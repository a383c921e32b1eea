"""Training scripts of the user's own: how they are named, and the files that they are in."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder

from pydantic import Field

from actbench.model.data import Data
from actbench.units import PositiveInt

_LONGEST_SHOWN = 60
"""Characters of a script and its arguments in a sentence, which has others to say."""


class Script(Data):
    """A training script of the user's own, as ``python`` takes it.

    Attributes:
        target: A file, or the name of a module (``is_module``, as of ``python -m``).
        arguments: What follows the target.
        batch_size: Rows of a batch in place of those of the script's DataLoader; None for its own.
        steps: How many steps of its optimizer run; None until two in a row are equal.
        processes: How many processes train together; the first of them runs.
        raise_oom: Whether ``torch.OutOfMemoryError`` is raised where memory would run out.
        whole: Whether it runs to its end, with evaluations and saves, and not only until two steps are equal.
    """

    target: str = Field(min_length=1)
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    batch_size: PositiveInt | None = None
    steps: PositiveInt | None = None
    processes: PositiveInt = 1
    raise_oom: bool = False
    whole: bool = False

    @property
    def text(self) -> str:
        """The script and its arguments, as a shell takes them behind ``python``."""
        return shlex.join([*(["-m"] if self.is_module else []), self.target, *self.arguments])

    @property
    def shown(self) -> str:
        """The text for sentences: a path from the root without its folders, and arguments only where they are short."""
        is_long = not self.is_module and os.path.isabs(self.target)
        whole = self.model_copy(update={"target": os.path.basename(self.target) if is_long else self.target})
        if not self.arguments or len(whole.text) <= _LONGEST_SHOWN:
            return whole.text
        return f"{whole.model_copy(update={'arguments': ()}).text} …"

    @property
    def file(self) -> str | None:
        """The file that runs; None for a module that has none here."""
        return file_of_module(self.target) if self.is_module else self.target


def file_of_module(name: str) -> str | None:
    """Return the file that ``python -m name`` runs, of a package its ``__main__``; None if there is none.

    Nothing is imported, packages that the module is in neither.
    """
    spec = spec_of(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _found(f"{name}.__main__", list(spec.submodule_search_locations))
    return spec.origin if spec is not None and spec.has_location else None


def spec_of(name: str) -> ModuleSpec | None:
    """Return where a module or package is; None if it is nowhere. Nothing is imported."""
    parts = name.split(".")
    spec = _found(parts[0], None)
    for place in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _found(".".join(parts[:place]), list(spec.submodule_search_locations))
    return spec


def _found(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    """Return where a module is, as Python's finders tell; ``python -m`` looks in the current folder first."""
    if locations is None and (here := PathFinder.find_spec(name, [os.getcwd()])) is not None:
        return here
    for finder in sys.meta_path:
        with suppress(ImportError, ValueError, KeyError):  # no module has the name, or the parent is not imported
            if (spec := finder.find_spec(name, locations)) is not None:
                return spec
    own = name.rpartition(".")[2]
    folders = [os.path.join(location, own) for location in locations or () if own.isidentifier()]
    if not (folder := next(filter(os.path.isdir, folders), None)):
        return None
    found = ModuleSpec(name, None, is_package=True)  # a package without __init__.py: finders ask the imported parent
    found.submodule_search_locations = [folder]
    return found
