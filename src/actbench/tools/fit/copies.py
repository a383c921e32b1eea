"""A planner that learns what it can from copies of a deep model with few of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actbench.model.records import Case
from actbench.tools.fit.costs import Costs
from actbench.tools.fit.effects import COPIED
from actbench.tools.fit.plan import Around, Plan
from actbench.tools.fit.planner import Planner
from actbench.workload.names import with_blocks

COPIES = (COPIED, COPIED + 2)
"""Blocks of two copies; from one to the other, each block adds what it adds in the whole model."""


@dataclass
class FromCopies(Planner):
    """A planner that learns what changes around the blocks do from two copies of a deep model, not from the whole."""

    def _change_cases(self, around: Around, changes: Sequence[Around]) -> dict[Case, Plan]:
        if self.space.blocks.copy is None:
            return super()._change_cases(around, changes)
        plans = [Plan(around), *(Plan(around | change) for change in changes)]
        return {self._copied(plan, count): plan for plan in plans for count in COPIES}

    def _copied(self, plan: Plan, count: int) -> Case:
        exact = self.exact.model_copy(update={"model": with_blocks(self.exact.model, count)})
        return plan.case(exact, self.space.blocks.part)

    def _changes(self, around: Around, changes: Sequence[Around], exact: Costs) -> dict[Around, Costs]:
        if self.space.blocks.copy is None:
            return super()._changes(around, changes, exact)
        few, more = (self._costs(Plan(around), count) for count in COPIES)
        steps = (len(self.space.blocks.paths) - COPIES[0]) / (COPIES[1] - COPIES[0])
        learned = {}
        for change in changes:
            self._note(change, self._copied(Plan(around | change), COPIES[0]))
            first, second = (self._costs(Plan(around | change), count) for count in COPIES)
            if few is not None and more is not None and first is not None and second is not None:
                learned[change] = (first - few).at(self.space.blocks.places).grown(second - more, steps)
        return learned

    def _costs(self, plan: Plan, count: int) -> Costs | None:
        return Costs.of(self.outcomes.get(self._copied(plan, count)))
