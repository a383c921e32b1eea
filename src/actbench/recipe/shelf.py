"""Recipes as files: those that ship with actbench, found by name, and a user's own, by path."""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from actbench.errors import RecipeError
from actbench.reading import read_bytes
from actbench.units import MIB

_MOST_BYTES = MIB


@dataclass(frozen=True)
class Shelf:
    """The shipped recipes of one kind.

    Attributes:
        suffix: What the names of their files end with, such as ``.toml``; the rest is a bare name without a dot.
        verb: What runs them.
        section: The table that each of them has, and none of another kind.
    """

    suffix: str
    verb: str
    section: str

    def names(self) -> list[str]:
        """Return the names of the shipped recipes."""
        files = (file.name for file in resources.files("actbench.recipes").iterdir())
        found = (name.removesuffix(self.suffix) for name in files if name.endswith(self.suffix))
        return sorted(name for name in found if "." not in name)

    def source(self, name: str) -> str:
        """Return the text of a shipped recipe.

        Raises:
            RecipeError: None is called so.
        """
        if name not in self.names():
            raise self._unknown(name)
        return self._shipped(name).read_text(encoding="utf-8")

    def read(self, source: str | Path) -> dict[str, Any]:
        """Read a recipe from a file, or a shipped one by its name; ``name`` is that of the file unless given.

        Raises:
            RecipeError: There is no such recipe, or it is no TOML, or of another kind.
        """
        file = self._file(source)
        try:
            content = read_bytes(file, _MOST_BYTES) if isinstance(file, Path) else file.read_bytes()
            data = tomllib.loads(content.decode())
        except OSError as error:
            raise RecipeError(f"{source}: the recipe cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise RecipeError(f"{source}: the recipe is not UTF-8 text (byte {error.start})") from None
        except RecursionError:
            raise RecipeError(f"{source}: not valid TOML: it is nested too deeply") from None
        except ValueError as error:  # an integer of thousands of digits is no TOMLDecodeError
            raise RecipeError(f"{source}: not valid TOML: {error}") from None
        for other in SHELVES:
            if other.section in data and self.section not in data:
                raise other._is_here(source)
        return {"name": Path(file.name.removesuffix(self.suffix)).stem, **data}

    def ships(self, source: str | Path) -> bool:
        """Whether a recipe is meant that ships with actbench, and no file of a user's."""
        return str(source) in self.names()

    def _file(self, source: str | Path) -> Traversable:
        text = str(source)
        if self.ships(source):
            return self._shipped(text)
        if not text.strip():
            raise RecipeError("the name of the recipe is empty")
        path = Path(source)
        if os.path.exists(path) or path.suffix == ".toml" or len(path.parts) > 1:
            return path
        raise self._unknown(text)

    def _shipped(self, name: str) -> Traversable:
        return resources.files("actbench.recipes") / f"{name}{self.suffix}"

    def _unknown(self, name: str) -> RecipeError:
        for other in SHELVES:
            if name in other.names():
                return other._is_here(name)
        names = self.names()
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return RecipeError(f"there is no recipe {name!r}; {hint}write a path, or one of: {', '.join(names)}")

    def _is_here(self, source: str | Path) -> RecipeError:
        return RecipeError(f"{source} is a recipe of 'actbench {self.verb}': run 'actbench {self.verb} {source}'")


SWEEPS = Shelf(".toml", "sweep", "workload")
TRAININGS = Shelf(".train.toml", "train", "train")
SHELVES = (SWEEPS, TRAININGS)
