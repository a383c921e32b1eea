"""What to measure, as its author wrote it: a TOML file, or flags, that span a grid of cases.

A list in ``[workload]``, ``meters`` or ``seed`` is an axis of the grid, several ``[[workload]]`` are grids of their
own, and each ``[[scheme]]`` is measured at every point.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, field_validator

from actbench.errors import UsageError
from actbench.model.data import Data
from actbench.model.meters import MeterName
from actbench.model.records import Case
from actbench.report.tables.columns import names_in
from actbench.run.recipes.files import SWEEPS, BaseRecipe, RecipeFiles, Tables, check_count
from actbench.run.recipes.sections import Measure, Planned, SchemeRow, Switch, WorkloadGrid, as_tuple, of_real_device
from actbench.validation import flag


def _columns(value: Any) -> Any:
    """Read the names of columns, a list or divided by commas; a ValueError for one that there is not."""
    try:
        return names_in(value if isinstance(value, str) else ",".join(map(str, as_tuple(value)))) if value else ()
    except UsageError as error:
        raise ValueError(str(error)) from None


class Recipe(BaseRecipe):
    """What to measure: one or several grids of models, settings and batch sizes, and how to measure them.

    With ``cumulative`` the schemes of a model are added one after the other. Without ``exact`` the unchanged model is
    not measured, nor is anything that takes it: gradient errors, and speeds and savings in comparison with it.
    ``columns`` are those that are shown, with those that another setting asks for.
    """

    files: ClassVar[RecipeFiles] = SWEEPS
    sections: ClassVar[Mapping[str, type[Data]]] = {"workload": WorkloadGrid, "measure": Measure}

    workload: Tables[WorkloadGrid]
    measure: Measure = Measure()
    cumulative: Switch = False
    exact: Switch = True
    columns: Annotated[tuple[str, ...], BeforeValidator(_columns)] = ()
    scheme: tuple[SchemeRow, ...] = ()

    @field_validator("scheme")
    @classmethod
    def _no_scheme_twice(cls, rows: tuple[SchemeRow, ...]) -> tuple[SchemeRow, ...]:
        groups: dict[tuple[str, ...], list[SchemeRow]] = {}
        for row in rows:
            before = groups.setdefault(row.parts, [])
            for other in before:
                if row.alone == other.alone and row.meets(other):
                    raise ValueError(f"the same scheme is given twice: {other.spec!r} and {row.spec!r}")
            before.append(row)
        return rows

    @property
    def models(self) -> tuple[str, ...]:
        """The models of all grids."""
        return tuple(model for grid in self.workload for model in grid.model)

    @property
    def meters(self) -> set[MeterName]:
        """The meters of all grids."""
        return {meter for grid in self.workload for meter in self._meters(grid)}

    @property
    def shown_columns(self) -> tuple[str, ...]:
        """The columns to show: those that were chosen, then those without which another setting shows nothing."""
        batches = {rows for grid in self.workload for rows in grid.batch_size}
        of_rows = {"model": len(self.models) > 1, "batch": len(batches) > 1, "meter": len(self.meters) > 1}
        # without any of them a table has all that distinguish rows
        telling = [name for name, is_needed in of_rows.items() if is_needed and {"scheme", *of_rows} & {*self.columns}]
        return tuple(dict.fromkeys([*self.columns, *self.asked_columns, *telling])) if self.columns else ()

    @property
    def asked_columns(self) -> tuple[str, ...]:
        """The columns with the answers to what settings ask for: they are shown however narrow a terminal is."""
        writes = any(grid.generate for grid in self.workload)
        asked = {
            "largest-batch": self.measure.largest_batch,
            "longest-prompt": self.measure.largest_batch and writes,
            "over-limit": self.measure.memory_limit is not None,
            "peak-vs-previous": self.cumulative,
            "cache": writes,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    @property
    def code(self) -> tuple[str, ...]:
        """The code that the recipe names, which measuring runs."""
        trusting = [grid for grid in self.workload if grid.trust_remote_code]
        remote = [f"trust_remote_code of {model}" for grid in trusting for model in grid.model]
        return tuple(dict.fromkeys([*super().code, *remote]))

    def rows(self, model: str) -> tuple[SchemeRow, ...]:
        """Return the schemes for a model, with ``exact`` first unless the author gave it, or wants it not."""
        rows, stack = [], list[str]()
        for row in super().rows(model):
            if row.spec == "exact" and not self.exact:
                continue
            if self.cumulative and row.is_added:
                stack.append(row.spec)
                row = row.model_copy(update={"spec": "+".join(stack)})
            rows.append(row)
        return tuple(rows)

    def _check_repeats(self) -> None:
        if self.cumulative and len([row for row in self.scheme if row.is_added]) < 2:
            raise ValueError("cumulative adds schemes one after the other: give at least two in addition to exact")
        bare = next((model for model in self.models if not self.rows(model)), None)
        if bare is not None:
            raise ValueError(
                f"without the unchanged model (exact = false) nothing is measured of {bare!r}: give a scheme"
            )
        check_count(sum(self._count(grid) for grid in self.workload), "cases")
        meters = self.meters
        for place, row in enumerate(self.scheme):
            if not row.is_for(meters):
                raise ValueError(f"scheme[{place}].meters: this recipe measures on {', '.join(sorted(meters))}")
            if self.cumulative and row.meters and row.is_added:
                raise ValueError(
                    f"scheme[{place}].meters: a cumulative recipe adds it on every meter; let it stand alone"
                )
        seen: set[str] = set()
        for planned in self.cases():
            case = planned.case
            if case.key() in seen:
                raise ValueError(
                    f"the same case is given twice: {case.model}, batch size {case.batch_size}, {case.scheme} "
                    f"({case.meter}); each [[workload]] must differ from the others"
                )
            seen.add(case.key())

    def _count(self, grid: WorkloadGrid) -> int:
        rows = sum(len(self._rows_on(model, meter)) for model in grid.model for meter in self._meters(grid))
        return grid.points_of_a_model * len(self.measure.seed) * rows

    def _meters(self, grid: WorkloadGrid) -> tuple[MeterName, ...]:
        return grid.meters or self.measure.meters

    def _rows_on(self, model: str, meter: MeterName) -> list[SchemeRow]:
        return [row for row in self.rows(model) if row.is_for((meter,))]

    def cases(self) -> tuple[Planned[Case], ...]:
        """Return every case; the schemes of one model and batch follow one another."""
        return tuple(planned for grid in self.workload for planned in self._cases_of(grid))

    def _cases_of(self, grid: WorkloadGrid) -> Iterator[Planned[Case]]:
        # The largest batch does not depend on the batch size, so only the smallest of the grid asks for it.
        measure, smallest = self.measure, min(grid.batch_size)
        done: set[tuple[Any, ...]] = set()
        for whole, meter, seed in itertools.product(grid.points(), self._meters(grid), measure.seed):
            point = whole if meter == "simulated" else of_real_device(whole)
            if (same := (meter, seed, *point.items())) in done:  # it differs in what concerns simulations alone
                continue
            done.add(same)
            searched = measure.largest_batch and point["batch_size"] == smallest
            settings = measure.settings(meter) | point
            if searched and grid.largest_batch_within is not None:
                settings.setdefault("memory_limit_bytes", grid.largest_batch_within)
            if not self.exact and meter != "simulated":  # which compares no gradients anyway
                settings["gradient_quality"] = False
            for row in self._rows_on(point["model"], meter):
                case = Case(
                    **settings,
                    scheme=row.spec,
                    meter=meter,
                    find_largest_batch=searched,
                    seed=seed,
                )
                yield Planned(case, row.label, row.published)

    @classmethod
    def from_flags(
        cls,
        workload: Mapping[str, Any],
        measure: Mapping[str, Any] | None = None,
        schemes: Sequence[str] = (),
        *,
        cumulative: bool = False,
        exact: bool = True,
    ) -> Recipe:
        """Build a recipe from flags, by field of ``WorkloadGrid`` and ``Measure``; None was not given.

        Raises:
            RecipeError: A value cannot be used; the message names its flag.
        """
        models = workload.get("model") or ()
        name = (models if isinstance(models, str) else "+".join(models)) or "unnamed"
        writes = workload.get("generate") is not None
        title = f"What does {name} need to write?" if writes else f"What does each scheme save on {name}?"
        base = {"title": title, "name": name, "workload": [{}]}
        merged = _with_flags(base, workload, measure or {}, schemes, cumulative=cumulative, exact=exact)
        return Recipe.validated(merged, "command line", flag)

    def with_flags(
        self,
        workload: Mapping[str, Any] | None = None,
        measure: Mapping[str, Any] | None = None,
        schemes: Sequence[str] = (),
        *,
        cumulative: bool = False,
        exact: bool = True,
    ) -> Recipe:
        """Return this recipe with its settings replaced by the given flags; see :meth:`from_flags`."""
        base = self.model_dump(exclude_none=True)
        merged = _with_flags(base, workload or {}, measure or {}, schemes, cumulative=cumulative, exact=exact)
        return Recipe.validated(merged, "command line", flag)


def _with_flags(
    base: Mapping[str, Any],
    workload: Mapping[str, Any],
    measure: Mapping[str, Any],
    schemes: Sequence[str],
    *,
    cumulative: bool,
    exact: bool,
) -> dict[str, Any]:
    merged = {**base, **({"cumulative": True} if cumulative else {}), **({} if exact else {"exact": False})}
    chosen = {**_given(workload), **({"meters": None} if measure.get("meters") else {})}
    merged["workload"] = [{**grid, **chosen} for grid in base["workload"]]
    merged["measure"] = {**base.get("measure", {}), **_given(measure)}
    if measure.get("meters"):  # what is for other meters alone is left out
        meters = as_tuple(measure["meters"])
        merged["scheme"] = [row for row in base.get("scheme", ()) if SchemeRow(**row).is_for(meters)]
    if schemes:
        merged["scheme"] = [{"spec": text} for text in schemes]
    return merged


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}
