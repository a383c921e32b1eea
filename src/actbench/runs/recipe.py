"""Which training runs to compare, as its author wrote it: a TOML file with ``[train]`` and ``[[scheme]]``.

Several ``[[train]]`` stand beside each other. Differences are from the exact model, so a row ``exact`` is put first
when the author gave none. The seeds go round outermost: the schemes of one seed run one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from actbench.mistakes import flag
from actbench.recipe.sections import SchemeRow
from actbench.recipe.shelf import TRAININGS, Shelf
from actbench.recipe.written import Tables, Written, check_count
from actbench.records import Data
from actbench.runs.records import DeviceName
from actbench.runs.sections import PlannedRun, TrainSection


class TrainingRecipe(Written):
    """Training runs to compare.

    Attributes:
        train: What is trained and how; one or several.
    """

    shelf: ClassVar[Shelf] = TRAININGS
    sections: ClassVar[Mapping[str, type[Data]]] = {"train": TrainSection}

    train: Tables[TrainSection]
    scheme: tuple[SchemeRow, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """The model of each section."""
        return tuple(section.model for section in self.train)

    def _check_repeats(self) -> None:
        check_count(sum(len(part.seeds) * len(self.rows(part.model)) for part in self.train), "training runs")
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

    def runs(self, auto: DeviceName) -> tuple[PlannedRun, ...]:
        """Return every run, the schemes of one seed beside each other.

        Args:
            auto: The device that ``auto`` stands for.
        """
        return tuple(run for section in self.train for run in self._runs_of(section, auto))

    def _runs_of(self, section: TrainSection, auto: DeviceName) -> Iterator[PlannedRun]:
        device = auto if section.device == "auto" else section.device
        for seed in section.seeds:
            for row in self.rows(section.model):
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
        return TrainingRecipe.validated(base, "command line", flag)


def _without(section: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}
