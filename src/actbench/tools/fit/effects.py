"""What changes do to a step, learned from simulated steps: of the whole model, or of a copy with few of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from actbench.model.blocks import BlockReadings
from actbench.model.measured import Measurement, Outcome
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.costs import Costs, Floats
from actbench.tools.fit.plan import Action, Around, Places
from actbench.workload.names import takes_changes, with_blocks

COPIED = 4
"""Blocks of a copy: the first, two for all in the middle, and the last."""

LEAST_SHARE = 0.02
"""The smallest share of a step's bytes or seconds that is worth a change."""

_LEAST_SECONDS = 0.005  # share of a step's time that its optimizer takes, from which on a faster one is tried
_LONG = 8  # blocks; fewer of them take hardly longer than a copy


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, and a shorter copy that tells what is done with them.

    Attributes:
        paths: Of all blocks, in the order of the forward pass.
        kinds: Equal blocks have one kind.
        outputs: Bytes that each block returns to the next.
        copy: The specification of the copy; None if the model itself tells.
        copied: Paths of the copy's blocks.
        rest: Paths of the modules outside of blocks that a choice changes, if it can be limited to them.
    """

    paths: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    outputs: Floats = field(default_factory=lambda: np.zeros(0))
    copy: str | None = None
    copied: tuple[str, ...] = ()
    rest: dict[Choice, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, read: BlockReadings | None) -> Blocks:
        """Return the blocks that were read in a step."""
        found = read.blocks if read else ()
        outputs = np.array([float(block.output_bytes) for block in found])
        return cls(tuple(block.path for block in found), tuple(block.kind for block in found), outputs)

    def copy_of(self, model: str) -> str | None:
        """Return the specification of a copy, if the blocks in the middle are equal and many."""
        equal = len(self.kinds) >= _LONG and len(set(self.kinds[1:-1])) == 1
        return with_blocks(model, COPIED) if equal and takes_changes(model) else None

    def is_told_by(self, read: BlockReadings) -> bool:
        """Whether the blocks of a copy are those of the model."""
        return [block.kind for block in read.blocks] == [self.kinds[place] for place in (0, 1, 2, -1)]

    @property
    def whole(self) -> Places:
        """Where choices act in the model."""
        return Places(self.paths, self.rest)

    @property
    def part(self) -> Places:
        """Where choices act in the model from which their effects are learned: the copy, or the model itself."""
        return Places(self.copied, self.rest) if self.copy else self.whole

    def are_changed_with(self, rest: Action) -> bool:
        """Whether an action on the modules outside of blocks acts on the whole model: it cannot be limited to them."""
        return any("" in self.rest[choice] for choice in rest)

    @property
    def places(self) -> Sequence[int]:
        """The place in a copy of the block that stands for each."""
        count = len(self.paths)
        return [0, 1, *[2] * (count - 3), 3] if self.copy else range(count)


@dataclass(frozen=True)
class Effect:
    """What an action does to each block of the whole model.

    Attributes:
        costs: The difference that it makes.
        keeps_output: Whether each block itself saves what it returns.
        frees_input: Whether each block saves nothing of what it gets as it is, so that it is freed.
        rest: The further difference that it makes where it acts outside of blocks, too; None if it does not.
    """

    costs: Costs
    keeps_output: tuple[bool, ...]
    frees_input: tuple[bool, ...]
    rest: Costs | None = None

    @property
    def is_felt(self) -> bool:
        """Whether it changes any bytes or seconds of a block."""
        return bool(np.any(self.costs.held) or np.any(self.costs.backward) or np.any(self.costs.seconds))

    def in_parts(self, parts: int) -> Effect:
        """Return the effect in a step of so many micro-batches."""
        rest = self.rest and self.rest.in_parts(parts)
        return replace(self, costs=self.costs.in_parts(parts), rest=rest)


@dataclass
class Effects:
    """Effects of changes in one way of computing: a precision, adapters, a size of micro-batches.

    Attributes:
        around: What makes it this way of computing.
        parts: How many micro-batches a step has.
        exact: Costs of the step without further changes.
        changes: What each further choice around the blocks does.
        actions: What each action does to the blocks.
    """

    around: Around
    parts: int
    exact: Costs
    changes: dict[Around, Costs] = field(default_factory=dict)
    actions: dict[Action, Effect] = field(default_factory=dict)


def effect_of(exact: Measurement, changed: Measurement, blocks: Blocks) -> Effect | None:
    """Return what an action on all blocks does, from a step without it and a step with it; None if nothing was read."""
    before, read = Costs.of(exact), changed.blocks
    after = Costs.of(changed, like=before)
    if before is None or after is None or read is None or len(after.held) != len(before.held):
        return None
    places = blocks.places
    keeps = [read.blocks[place].keeps_output for place in places]
    frees = [not read.blocks[place].keeps_input for place in places]
    costs = (after - before).at(places)
    return Effect(costs.of_blocks(), tuple(keeps), tuple(frees))


def of_optimizers(ways: Sequence[Effects], starts: Sequence[Outcome | None], start: Measurement) -> dict[Around, Costs]:
    """Return what optimizers do, as learned in ways of computing with the same bytes of state and gradients.

    ``starts`` has the step of each way without changes, ``start`` is that of another way.
    """
    bytes_of = attrgetter("weights_bytes", "gradients_bytes", "optimizer_bytes")
    found: dict[Around, Costs] = {}
    for way, other in zip(ways, starts, strict=True):
        if way.parts == 1 and isinstance(other, Measurement) and bytes_of(other) == bytes_of(start):
            alone = (each for each in way.changes if all(choice.changes == ("optimizer",) for choice in each))
            found |= {each: way.changes[each] for each in alone}
    return found


def matters(choice: Choice, exact: Measurement) -> bool:
    """Whether what a choice changes is large enough a part of a step: optimizer state and gradients may not be."""
    if not {"optimizer", "gradients"}.issuperset(choice.changes):
        return True
    state = (exact.optimizer_bytes or 0) * (choice.optimizer is None)  # another one has the same state
    state += (exact.gradients_bytes or 0) * ("gradients" in choice.changes)
    seconds = exact.estimated.optimizer_seconds / exact.estimated.step_seconds if exact.estimated else 0.0
    is_faster = choice.optimizer is not None and seconds >= _LEAST_SECONDS
    return is_faster or state / exact.peak_bytes >= LEAST_SHARE


def change_in_parts(costs: Costs, parts: int, cut: tuple[int, Costs] | None = None) -> Costs:
    """Return the effect of a change around the blocks in so many micro-batches, from that in a whole batch.

    ``cut`` is a number of micro-batches with the effect in that many: the two effects show which bytes do not grow with
    the batch, such as a gradient that a loss in pieces holds. Without ``cut`` all bytes between the passes count as
    growing.
    """
    if cut is None:
        return replace(costs, top=costs.top / parts, held=costs.held / parts, forward=costs.forward / parts)
    count, there = cut
    share = (1 / parts - 1 / count) / (1 - 1 / count)  # 1 in a whole batch, 0 in that number
    return replace(
        costs,
        base=there.base,
        top=there.top + share * (costs.top - there.top),
        held=there.held + share * (costs.held - there.held),
        forward=there.forward + share * (costs.forward - there.forward),
    )
