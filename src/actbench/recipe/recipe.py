"""What to compare, as its author wrote it: a TOML file, or flags, that span a grid of cases.

A list in ``[workload]``, ``meters`` and ``seed`` spans the grid, several ``[[workload]]`` stand beside each other, and
each ``[[scheme]]`` is measured at every point. Ratios are against the exact model, so a row ``exact`` is put first when
the author gave none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator, model_validator

from actbench.errors import RecipeError
from actbench.mistakes import Location, dotted, explain, flag
from actbench.recipe.sections import Measure, PlannedCase, SchemeRow, WorkloadGrid
from actbench.recipe.shelf import SWEEPS
from actbench.records import Case, Data, Published


def _as_rows(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


class Recipe(Data):
    """What to compare.

    Attributes:
        title: The question that the comparison answers.
        name: Names the results; that of the file unless given.
        workload: Grids of models, settings and batch sizes; one or several.
        measure: Meters and their settings.
        scheme: The schemes to compare.
    """

    title: str = Field(min_length=1)
    name: str = Field(min_length=1)
    workload: Annotated[tuple[WorkloadGrid, ...], BeforeValidator(_as_rows), Field(min_length=1)]
    measure: Measure = Measure()
    scheme: tuple[SchemeRow, ...] = ()

    @field_validator("scheme")
    @classmethod
    def _no_scheme_twice(cls, rows: tuple[SchemeRow, ...]) -> tuple[SchemeRow, ...]:
        for row, other in itertools.combinations(rows, 2):
            if row.repeats(other):
                raise ValueError(f"the same scheme stands twice: {row.spec!r} and {other.spec!r}")
        return rows

    @model_validator(mode="after")
    def _no_case_twice(self) -> Recipe:
        seen: set[str] = set()
        for planned in self.cases():
            case = planned.case
            if case.key() in seen:
                raise ValueError(
                    f"the same case stands twice: {case.model}, batch size {case.batch_size}, {case.scheme} "
                    f"({case.meter}); each [[workload]] must differ from the others"
                )
            seen.add(case.key())
        return self

    @model_validator(mode="after")
    def _models_are_there(self) -> Recipe:
        models = list(dict.fromkeys(model for grid in self.workload for model in grid.model))
        for place, row in enumerate(self.scheme):
            for model in row.models or ():
                if model not in models:
                    found = f"scheme[{place}].models: {model!r} is not a model of this recipe"
                    raise ValueError(f"{found}: {', '.join(models)}")
        return self

    def rows(self, model: str) -> tuple[SchemeRow, ...]:
        """Return the schemes for a model, with ``exact`` first when the author gave none: ratios need it."""
        rows = tuple(row for row in self.scheme if row.suits(model))
        return rows if any(row.spec == "exact" for row in rows) else (SchemeRow(spec="exact"), *rows)

    def cases(self) -> tuple[PlannedCase, ...]:
        """Return every case of the grid, the schemes of one point beside each other."""
        return tuple(planned for grid in self.workload for planned in self._cases_of(grid))

    def _cases_of(self, grid: WorkloadGrid) -> Iterator[PlannedCase]:
        # The largest batch does not depend on the batch size, so only the smallest of the grid asks for it.
        measure, smallest = self.measure, min(grid.batch_size)
        for point, meter, seed in itertools.product(grid.points(), grid.meters or measure.meters, measure.seed):
            for row in self.rows(point["model"]):
                case = Case(
                    **point,
                    **measure.settings(meter),
                    scheme=row.spec,
                    meter=meter,
                    find_largest_batch=measure.largest_batch and point["batch_size"] == smallest,
                    seed=seed,
                )
                yield PlannedCase(case, row.label, row.published)

    @classmethod
    def from_flags(
        cls, workload: Mapping[str, Any], measure: Mapping[str, Any] | None = None, schemes: Sequence[str] = ()
    ) -> Recipe:
        """Build a recipe from command-line flags; those that are None were not given.

        Args:
            workload: By field of :class:`~actbench.recipe.sections.WorkloadGrid`.
            measure: By field of :class:`~actbench.recipe.sections.Measure`.
            schemes: Specifications.

        Raises:
            RecipeError: A value cannot be used; the message names its flag.
        """
        models = workload.get("model") or ()
        name = (models if isinstance(models, str) else "+".join(models)) or "unnamed"
        base = {"title": f"What does each scheme save on {name}?", "name": name, "workload": [{}]}
        return _validated(_with_flags(base, workload, measure or {}, schemes), "command line", flag)

    def with_flags(
        self,
        workload: Mapping[str, Any] | None = None,
        measure: Mapping[str, Any] | None = None,
        schemes: Sequence[str] = (),
    ) -> Recipe:
        """Return this recipe with the flags that were given in place of what it says; see :meth:`from_flags`."""
        base = self.model_dump(exclude_none=True)
        return _validated(_with_flags(base, workload or {}, measure or {}, schemes), "command line", flag)


def load(source: str | Path) -> Recipe:
    """Read a recipe from a file, or one that ships with actbench by its name.

    Raises:
        RecipeError: There is no such recipe, or it does not parse or validate; each line of the message names the
            file and the place of a mistake.
    """
    data = SWEEPS.read(source)
    if "workload" not in data and "train" in data:
        raise RecipeError(f"{source}: this recipe trains models and measures no steps: run 'actbench train {source}'")
    return _validated(data, str(source))


def names() -> list[str]:
    """Return the names of the recipes that ship with actbench."""
    return SWEEPS.names()


def shipped() -> dict[str, str]:
    """Return the title of each recipe that ships with actbench, by name."""
    return {name: load(name).title for name in names()}


def source(name: str) -> str:
    """Return the text of a recipe that ships with actbench.

    Raises:
        RecipeError: None is called so.
    """
    return SWEEPS.source(name)


def _validated(data: Mapping[str, Any], source: str, place: Callable[[Location], str] = dotted) -> Recipe:
    sections: dict[str, type[BaseModel]] = {
        "": Recipe,
        "workload": WorkloadGrid,
        "measure": Measure,
        "scheme": SchemeRow,
        "published": Published,
    }
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        lines = explain(error, data, sections, place)
        raise RecipeError("\n".join(dict.fromkeys(f"{source}: {line}" for line in lines))) from None


def _with_flags(
    base: Mapping[str, Any], workload: Mapping[str, Any], measure: Mapping[str, Any], schemes: Sequence[str]
) -> dict[str, Any]:
    merged = dict(base)
    chosen = {**_given(workload), **({"meters": None} if measure.get("meters") else {})}
    merged["workload"] = [{**grid, **chosen} for grid in base["workload"]]
    merged["measure"] = {**base.get("measure", {}), **_given(measure)}
    if schemes:
        merged["scheme"] = [{"spec": text} for text in schemes]
    return merged


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}
