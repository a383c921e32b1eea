"""What recipes of all kinds share: the files that they are read from, and the schemes to compare."""

from __future__ import annotations

import difflib
import os
import tomllib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from actbench.errors import RecipeError
from actbench.model.data import Data
from actbench.model.namedcode import named_code
from actbench.model.provenance import Published
from actbench.paths import read_toml
from actbench.run.recipes.sections import SchemeRow, as_tuple
from actbench.validation import Location, dotted, explain


@dataclass(frozen=True)
class RecipeFiles:
    """The shipped recipes of one kind.

    Attributes:
        suffix: What the names of their files end with, such as ``.toml``; the rest is a name without a dot.
        verb: The verb of the command line that runs them.
        section: The table that each of them has, and none of another kind.
    """

    suffix: str
    verb: str
    section: str

    def names(self) -> list[str]:
        """Return the names of the shipped recipes."""
        found = (file.name for file in resources.files("actbench.recipes").iterdir())
        names = (name.removesuffix(self.suffix) for name in found if name.endswith(self.suffix))
        return sorted(name for name in names if "." not in name)

    def source(self, name: str) -> str:
        """Return the text of a shipped recipe; a RecipeError if there is none of this name."""
        if name not in self.names():
            raise self._unknown(name)
        return self._shipped(name).read_text(encoding="utf-8")

    def read(self, source: str | Path) -> dict[str, Any]:
        """Read a file, or a shipped recipe by name; a RecipeError if it is missing, no TOML or of another kind."""
        if self.ships(source):
            file, data = self._shipped(str(source)), tomllib.loads(self.source(str(source)))
        else:
            file = self._file(source)
            data = read_toml(file, f"{source}: the recipe", RecipeError)
        for other in KINDS:
            if other.section in data and self.section not in data:
                raise other._is_here(source)
        return {"name": Path(file.name.removesuffix(self.suffix)).stem, **data}

    def title(self, name: str) -> str:
        """Return the title of a shipped recipe."""
        return str(self.read(name)["title"])

    def ships(self, source: str | Path) -> bool:
        """Whether the recipe is a shipped one."""
        return str(source) in self.names()

    def _file(self, source: str | Path) -> Path:
        text = str(source)
        if not text.strip():
            raise RecipeError("the name of the recipe is empty")
        path = Path(source)
        if os.path.exists(path) or path.suffix == ".toml" or len(path.parts) > 1:
            return path
        raise self._unknown(text)

    def _shipped(self, name: str) -> Traversable:
        return resources.files("actbench.recipes") / f"{name}{self.suffix}"

    def _unknown(self, name: str) -> RecipeError:
        for other in KINDS:
            if name in other.names():
                return other._is_here(name)
        close = closest(name)
        hint = "" if close is None else f"did you mean {close!r}? "
        known = "; ".join(f"of 'actbench {kind.verb}': {', '.join(kind.names())}" for kind in KINDS)
        return RecipeError(f"there is no recipe {name!r}; {hint}write a path, or one {known}")

    def _is_here(self, source: str | Path) -> RecipeError:
        return RecipeError(f"{source} is a recipe of 'actbench {self.verb}': run 'actbench {self.verb} {source}'")


SWEEPS = RecipeFiles(".toml", "sweep", "workload")
TRAININGS = RecipeFiles(".train.toml", "train", "train")
KINDS = (SWEEPS, TRAININGS)


def files_of(name: str) -> RecipeFiles | None:
    """Return the recipes, of whatever kind, that a shipped one of this name is among; None if there is none."""
    return next((kind for kind in KINDS if kind.ships(name)), None)


def closest(name: str) -> str | None:
    """Return the shipped recipe, of any kind, whose name is closest to one that is mistyped."""
    close = difflib.get_close_matches(name.lower(), [known for kind in KINDS for known in kind.names()], n=1)
    return close[0] if close else None


T = TypeVar("T")
Tables = Annotated[tuple[T, ...], BeforeValidator(as_tuple), Field(min_length=1)]
"""One table of a file, or several beside each other, read as a tuple."""


MOST_CASES = 100_000


def check_count(count: int, what: str) -> None:
    """Raise a ValueError for a recipe of more than ``MOST_CASES``, before any of them is made."""
    if count > MOST_CASES:
        raise ValueError(
            f"the recipe spans {count:,} {what} and may span {MOST_CASES:,}: give fewer values, seeds, models or "
            "schemes, or divide it among several recipes"
        )


class BaseRecipe(Data):
    """A recipe as its author wrote it; the exact model is compared, too.

    A kind of recipe sets ``files``, and in ``sections`` the model of each of its tables beside ``[[scheme]]``. The
    title is the question that the comparison answers.
    """

    files: ClassVar[RecipeFiles]
    sections: ClassVar[Mapping[str, type[Data]]]

    title: str = Field(min_length=1)
    name: str = Field(min_length=1)
    if TYPE_CHECKING:  # each kind declares it itself, behind its tables: mistakes are told in the order of the fields
        scheme: tuple[SchemeRow, ...] = ()

    @property
    @abstractmethod
    def models(self) -> tuple[str, ...]:
        """The models that schemes are compared on."""

    @abstractmethod
    def _check_repeats(self) -> None:
        """Raise a ValueError for what is given twice."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_repeats()
        models = tuple(dict.fromkeys(self.models))
        for place, row in enumerate(self.scheme):
            for model in row.models or ():
                if model not in models:
                    found = f"scheme[{place}].models: {model!r} is not a model of this recipe"
                    raise ValueError(f"{found}: {', '.join(models)}")
        return self

    @property
    def code(self) -> tuple[str, ...]:
        """The code that the recipe names, which measuring runs."""
        named = [f"model {model}" for model in self.models if named_code(model)]
        return tuple(dict.fromkeys(named + [f"scheme {row.spec}" for row in self.scheme if named_code(row.spec)]))

    def rows(self, model: str) -> tuple[SchemeRow, ...]:
        """Return the schemes for a model, with ``exact`` first unless the author gave it."""
        rows = tuple(row for row in self.scheme if row.suits(model))
        return rows if any(row.spec == "exact" for row in rows) else (SchemeRow(spec="exact"), *rows)

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Read a recipe from a file, or a shipped one by its name.

        Raises:
            RecipeError: There is no such recipe, or it does not parse or validate; each line of the message names the
                file and the place of a mistake.
        """
        return cls.validated(cls.files.read(source), str(source))

    @classmethod
    def load_to_run(cls, source: str | Path, *, trusted: bool) -> Self:
        """Read a recipe, and refuse one from a user's file that names code, unless it is trusted.

        What a user types runs as it is typed; a recipe may have come from anyone, and reads like data.

        Raises:
            RecipeError: As :meth:`load`, or the recipe names code and is not trusted.
        """
        recipe = cls.load(source)
        if recipe.code and not trusted and not cls.files.ships(source):
            raise RecipeError(
                f"{source}: the recipe runs code: {', '.join(recipe.code)}. Read that code; if you trust it, say so "
                "with --trust-recipe"
            )
        return recipe

    @classmethod
    def validated(cls, data: Mapping[str, Any], source: str, place: Callable[[Location], str] = dotted) -> Self:
        """Return the recipe that keys and values make; ``place`` writes a location in messages.

        Raises:
            RecipeError: It does not validate; the message has a line for each mistake.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = explain(error, data, {"": cls, **cls.sections, "scheme": SchemeRow, "published": Published}, place)
            raise RecipeError("\n".join(dict.fromkeys(f"{source}: {line}" for line in lines))) from None
