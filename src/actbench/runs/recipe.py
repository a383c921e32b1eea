"""Which training runs to compare, as its author wrote it: a TOML file with ``[train]`` and ``[[scheme]]``.

Several ``[[train]]`` stand beside each other. Differences are from the exact model, so a row ``exact`` is put first
when the author gave none. The seeds go round outermost: the schemes of one seed run one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from actbench.errors import RecipeError
from actbench.mistakes import Location, dotted, explain, flag
from actbench.recipe.sections import SchemeRow
from actbench.recipe.shelf import TRAININGS
from actbench.records import Data, Published
from actbench.runs.records import DeviceName
from actbench.runs.sections import PlannedRun, TrainSection

_SECTIONS: dict[str, type[BaseModel]] = {"train": TrainSection, "scheme": SchemeRow, "published": Published}


def _as_rows(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


class TrainingRecipe(Data):
    """Training runs to compare.

    Attributes:
        title: The question that the comparison answers.
        name: Names the results; that of the file unless given.
        train: What is trained and how; one or several.
        scheme: The schemes to compare.
    """

    title: str = Field(min_length=1)
    name: str = Field(min_length=1)
    train: Annotated[tuple[TrainSection, ...], BeforeValidator(_as_rows), Field(min_length=1)]
    scheme: tuple[SchemeRow, ...] = ()

    @model_validator(mode="after")
    def _nothing_twice(self) -> TrainingRecipe:
        seen: dict[str, str] = {}
        for planned in self.runs("cpu"):
            case = planned.case
            name = "+".join(sorted(case.scheme.split("+")))
            key = case.model_copy(update={"scheme": name}).key()
            if key in seen:
                raise ValueError(
                    f"the same run stands twice: {case.model} on {case.data}, seed {case.seed}, {seen[key]!r} and "
                    f"{case.scheme!r}; each [[train]] and each [[scheme]] must differ from the others"
                )
            seen[key] = case.scheme
        return self

    @model_validator(mode="after")
    def _models_are_there(self) -> TrainingRecipe:
        models = list(dict.fromkeys(section.model for section in self.train))
        for place, row in enumerate(self.scheme):
            for model in row.models or ():
                if model not in models:
                    found = f"scheme[{place}].models: {model!r} is not a model of this recipe"
                    raise ValueError(f"{found}: {', '.join(models)}")
        return self

    def runs(self, auto: DeviceName) -> tuple[PlannedRun, ...]:
        """Return every run, the schemes of one seed beside each other.

        Args:
            auto: The device that ``auto`` stands for.
        """
        return tuple(run for section in self.train for run in self._runs_of(section, auto))

    def _runs_of(self, section: TrainSection, auto: DeviceName) -> Iterator[PlannedRun]:
        device = auto if section.device == "auto" else section.device
        rows = [row for row in self.scheme if row.suits(section.model)]
        if all(row.spec != "exact" for row in rows):
            rows.insert(0, SchemeRow(spec="exact"))
        for seed in section.seeds:
            for row in rows:
                yield PlannedRun(section.case(row.spec, seed, device), row.label, row.published)

    def with_flags(self, flags: Mapping[str, Any], schemes: Sequence[str] = ()) -> TrainingRecipe:
        """Return this recipe with flags in place of what it says.

        Args:
            flags: By field of :class:`~actbench.runs.sections.TrainSection`; None was not given.
            schemes: Specifications; they stand for all schemes of the recipe.

        Raises:
            RecipeError: A value cannot be used; the message names its flag.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        left_out = {"epochs"} if "steps" in given else set()
        base = self.model_dump(exclude_none=True)
        base["train"] = [{**_without(section, left_out), **given} for section in base["train"]]
        if schemes:
            base["scheme"] = [{"spec": text} for text in schemes]
        return _validated(base, "command line", flag)


def load(source: str | Path) -> TrainingRecipe:
    """Read a recipe from a file, or one that ships with actbench by its name.

    Raises:
        RecipeError: There is no such recipe, or it does not parse or validate; each line of the message names the
            file and the place of a mistake.
    """
    data = TRAININGS.read(source)
    if "train" not in data and "workload" in data:
        raise RecipeError(f"{source}: this recipe measures steps and trains nothing: run 'actbench sweep {source}'")
    return _validated(data, str(source))


def names() -> list[str]:
    """Return the names of the training recipes that ship with actbench."""
    return TRAININGS.names()


def shipped() -> dict[str, str]:
    """Return the title of each training recipe that ships with actbench, by name."""
    return {name: load(name).title for name in names()}


def source(name: str) -> str:
    """Return the text of a training recipe that ships with actbench.

    Raises:
        RecipeError: None is called so.
    """
    return TRAININGS.source(name)


def _without(section: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


def _validated(data: Mapping[str, Any], source: str, place: Callable[[Location], str] = dotted) -> TrainingRecipe:
    try:
        return TrainingRecipe.model_validate(data)
    except ValidationError as error:
        lines = explain(error, data, {"": TrainingRecipe, **_SECTIONS}, place)
        raise RecipeError("\n".join(dict.fromkeys(f"{source}: {line}" for line in lines))) from None
