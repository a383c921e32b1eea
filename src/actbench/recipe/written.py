"""What recipes of steps and recipes of training runs have in common: schemes to compare, read from a file or flags."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from actbench.errors import RecipeError
from actbench.mistakes import Location, dotted, explain
from actbench.recipe.sections import SchemeRow
from actbench.recipe.shelf import Shelf
from actbench.records import Data, Published


def _as_rows(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


T = TypeVar("T")
Tables = Annotated[tuple[T, ...], BeforeValidator(_as_rows), Field(min_length=1)]
"""One table of a file, or several beside each other, read as a tuple."""


MOST_CASES = 100_000


def check_count(count: int, what: str) -> None:
    """Refuse with a ValueError a recipe that spans more than ``MOST_CASES``, before any of them is made."""
    if count > MOST_CASES:
        raise ValueError(
            f"the recipe spans {count:,} {what} and may span {MOST_CASES:,}: give fewer values, seeds, models or "
            "schemes, or divide it among several recipes"
        )


class Written(Data):
    """A recipe as its author wrote it. Ratios and differences are from the exact model, which is always compared.

    Class attributes that a kind of recipe gives:
        shelf: Where those that ship with actbench are.
        sections: The model of each table that it has beside ``[[scheme]]``, by key.

    Attributes:
        title: The question that the comparison answers.
        name: Names the results; that of the file unless given.
        scheme: The schemes to compare.
    """

    shelf: ClassVar[Shelf]
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
        """Refuse with a ValueError what stands twice."""

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
        """What the recipe names that is code, which measuring runs; a kind of recipe may know of more."""
        named = [f"model {model}" for model in self.models if ".py:" in model]
        return tuple(dict.fromkeys(named + [f"scheme {row.spec}" for row in self.scheme if ".py:" in row.spec]))

    def rows(self, model: str) -> tuple[SchemeRow, ...]:
        """Return the schemes for a model, with ``exact`` first when the author gave none."""
        rows = tuple(row for row in self.scheme if row.suits(model))
        return rows if any(row.spec == "exact" for row in rows) else (SchemeRow(spec="exact"), *rows)

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Read a recipe from a file, or one that ships with actbench by its name.

        Raises:
            RecipeError: There is no such recipe, or it does not parse or validate; each line of the message names the
                file and the place of a mistake.
        """
        return cls.validated(cls.shelf.read(source), str(source))

    @classmethod
    def load_to_run(cls, source: str | Path, *, trusted: bool) -> Self:
        """Read a recipe as :meth:`load` does, and refuse one that names code unless the user trusts it.

        What a user types runs as it is typed; a recipe may have come from anyone, and reads like data.

        Raises:
            RecipeError: As :meth:`load`, or a recipe that does not ship with actbench names code and is not trusted.
        """
        recipe = cls.load(source)
        if recipe.code and not trusted and not cls.shelf.ships(source):
            raise RecipeError(
                f"{source}: the recipe runs code: {', '.join(recipe.code)}. Read that code; if you trust it, say so "
                "with --trust-recipe"
            )
        return recipe

    @classmethod
    def shipped(cls) -> dict[str, str]:
        """Return the title of each recipe that ships with actbench, by name."""
        return {name: cls.load(name).title for name in cls.shelf.names()}

    @classmethod
    def validated(cls, data: Mapping[str, Any], source: str, place: Callable[[Location], str] = dotted) -> Self:
        """Return the recipe that keys and values make.

        Args:
            data: As its author wrote it.
            source: Where, for messages.
            place: How a location in it is written.

        Raises:
            RecipeError: It does not validate; the message has a line for each mistake.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = explain(error, data, {"": cls, **cls.sections, "scheme": SchemeRow, "published": Published}, place)
            raise RecipeError("\n".join(dict.fromkeys(f"{source}: {line}" for line in lines))) from None
