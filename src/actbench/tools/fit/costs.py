"""What a step holds and takes, block by block and around the blocks, and what changes do to it: parts that add up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from actbench.model.blocks import BlockReadings
from actbench.model.measured import Measurement, Outcome
from actbench.tools.fit.plan import Action, Candidate, Places, patterns_of
from actbench.tools.fit.records import step_seconds_of
from actbench.workload.names import takes_changes, with_blocks, without

Floats = NDArray[np.float64]

COPIED = 4
"""Blocks of a copy: the first, two for all in the middle, and the last."""

COPIES = (COPIED, COPIED + 2)
"""Blocks of two copies; from one to the other, each block adds what it adds in the whole model."""

_LONG = 8  # blocks; fewer of them take hardly longer than a copy
_SHORT = 2 / 3  # of the blocks, at most, that a copy may have


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, and a shorter copy that tells what is done with them.

    Attributes:
        paths: Of all blocks, in the order of the forward pass.
        kinds: Equal blocks have one kind.
        outputs: Bytes that each block returns to the next.
        copy: The specification of the copy; None if the model itself tells.
        copied: Paths of the copy's blocks.
        chosen: Places in the model of the blocks that the copy has.
        rest: Paths of the modules outside of blocks that a candidate changes, if it can be limited to them.
    """

    paths: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    outputs: Floats = field(default_factory=lambda: np.zeros(0))
    copy: str | None = None
    copied: tuple[str, ...] = ()
    chosen: tuple[int, ...] = ()
    rest: dict[Candidate, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, read: BlockReadings | None) -> Blocks:
        """Return the blocks that were read in a step."""
        found = read.blocks if read else ()
        outputs = np.array([float(block.output_bytes) for block in found])
        return cls(tuple(block.path for block in found), tuple(block.kind for block in found), outputs)

    def shortened(self, model: str) -> Self | None:
        """Return the blocks with a copy that has the first, the last, and one of each row of equal blocks between them.

        Of a model with a config it has four blocks, and the blocks in the middle have to be equal. None if a copy would
        hardly be shorter, or cannot be made.
        """
        last, copy = len(self.kinds) - 1, None
        if len(self.kinds) < _LONG:
            return None
        chosen: tuple[int, ...] = (0, 1, 2, last)
        if takes_changes(model):
            copy = with_blocks(model, COPIED) if len(set(self.kinds[1:-1])) == 1 else None
        else:
            begins = (place for place in range(1, last) if place == 1 or self.kinds[place] != self.kinds[place - 1])
            chosen = (0, *begins, last)
            if len(chosen) <= _SHORT * len(self.kinds):
                left_out = [path for place, path in enumerate(self.paths) if place not in chosen]
                copy = without(model, patterns_of(left_out))
        return replace(self, copy=copy, chosen=chosen) if copy else None

    def is_told_by(self, read: BlockReadings) -> bool:
        """Whether the blocks of a copy are those of the model."""
        return [block.kind for block in read.blocks] == [self.kinds[place] for place in self.chosen]

    @property
    def grows(self) -> bool:
        """Whether two copies of different lengths tell what is around the blocks of the model."""
        return self.copy is not None and takes_changes(self.copy)

    @property
    def is_thinned(self) -> bool:
        """Whether the copy is the model without some of its blocks; what is around them is then the model's."""
        return self.copy is not None and not self.grows

    @property
    def whole(self) -> Places:
        """Where candidates act in the model."""
        return Places(self.paths, self.rest)

    @property
    def part(self) -> Places:
        """Where candidates act in the model from which their effects are learned: the copy, or the model itself."""
        return Places(self.copied, self.rest) if self.copy else self.whole

    def are_changed_with(self, rest: Action) -> bool:
        """Whether an action on the modules outside of blocks acts on the whole model: it cannot be limited to them."""
        return any("" in self.rest[each] for each in rest)

    @property
    def places(self) -> Sequence[int]:
        """The place in a copy of the block that stands for each."""
        count = len(self.paths)
        return [bisect_right(self.chosen, place) - 1 for place in range(count)] if self.copy else range(count)


@dataclass(frozen=True)
class Costs:
    """Bytes and seconds of a step; differences of two are the effect of a change, and effects add.

    Bytes of a block are counted from what is alive when its forward pass begins. Arrays have a number for each block.

    Attributes:
        base: Bytes alive when the first block begins: weights, optimizer state, the batch, what the stem made.
        stem: Most bytes before the first block begins.
        top: Most bytes between the last block's forward and its backward pass, beyond what all blocks hold.
        end: Most bytes after the first block's backward pass.
        update: Most bytes in the optimizer's step.
        top_gradients: Bytes of gradients that are there when the last block's backward pass begins.
        around_seconds: Time outside of the blocks, the optimizer's step included.
        held: Bytes that each block's forward pass leaves.
        forward: Most bytes in each block's forward pass.
        backward: Most bytes in its backward pass, without the gradients of what comes after it.
        gradients: Bytes of gradients that its backward pass leaves.
        seconds: Time of both passes.
    """

    base: float
    stem: float
    top: float
    end: float
    update: float
    top_gradients: float
    around_seconds: float
    held: Floats
    forward: Floats
    backward: Floats
    gradients: Floats
    seconds: Floats

    @classmethod
    def of(cls, measured: Outcome | None, parts: int = 1, like: Costs | None = None) -> Self | None:
        """Return the costs of a simulated step of so many micro-batches; None if it failed or has no estimated time.

        A script's own micro-batches come on top of these. Bytes are those of the last one. A step whose blocks were not
        read has none: all is around them. Where ``like`` is given, the step has the gradients of ``like``: all other
        bytes between two backward passes are those of the blocks.
        """
        seconds = step_seconds_of(measured)
        if seconds is None or not isinstance(measured, Measurement) or measured.phase_peaks is None:
            return None
        peaks, read = measured.phase_peaks, measured.blocks
        if read is None or not read.blocks:
            top, none = max(peaks.forward_bytes, peaks.backward_bytes), np.zeros(0)
            return cls(0.0, 0.0, top, 0.0, peaks.optimizer_bytes, 0.0, seconds, none, none, none, none, none)
        names = "before_bytes after_bytes forward_peak_bytes backward_peak_bytes done_bytes waiting_bytes"
        before, after, forward, backward, done, waiting = (
            np.array([getattr(block, name) for block in read.blocks], dtype=float) for name in names.split()
        )
        before = before - waiting  # as if what a block frees went when it ends
        after = np.append(after[:-1] - waiting[1:], after[-1] - waiting[-1])
        if len(read.blocks) > 1 and not (read.blocks[-1].keeps_input or read.blocks[-2].keeps_output):
            after[-1] -= read.blocks[-2].output_bytes  # its caller drops the input of the last block once it returns
        left = done - before  # by this block and all after it
        kinds = [block.kind for block in read.blocks]
        equal = [place for place, kind in enumerate(kinds[:-1]) if kind == kinds[-1]]
        last = float(left[equal[-1]] - left[equal[-1] + 1]) if equal else 0.0  # of the last, by the nearest equal one
        gradients = np.append(left[:-1] - left[1:], last) if like is None else like.gradients
        top_gradients = left[-1] - last if like is None else like.top_gradients
        after_each = top_gradients + np.append(np.cumsum(gradients[:0:-1])[::-1], 0.0)
        parts *= (measured.built and measured.built.micro_batches) or 1
        of_blocks = parts * np.array([block.forward_seconds + block.backward_seconds for block in read.blocks])
        return cls(
            base=before[0],
            stem=read.stem_peak_bytes,
            top=read.top_peak_bytes - after[-1],
            end=read.end_peak_bytes,
            update=peaks.optimizer_bytes,
            top_gradients=top_gradients,
            around_seconds=seconds - of_blocks.sum(),
            held=after - before,
            forward=forward - before,
            backward=backward - before - after_each,
            gradients=gradients,
            seconds=of_blocks,
        )

    def __add__(self, other: Costs) -> Costs:
        return Costs(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: Costs) -> Costs:
        return Costs(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))

    def towards(self, other: Costs, share: float, names: Sequence[str]) -> Costs:
        """Return these costs, with some of them moved by a share of the way to others, or beyond."""
        return replace(
            self,
            **{name: getattr(self, name) + share * (getattr(other, name) - getattr(self, name)) for name in names},
        )

    def at(self, places: Sequence[int]) -> Costs:
        """Return the costs of a longer model: each of its blocks costs what the block at the given place does."""
        return replace(self, **{name: getattr(self, name)[[*places]] for name in _OF_BLOCKS})

    def of_rest(self) -> Costs:
        """Return the costs outside of the blocks."""
        return replace(self, **{name: np.zeros_like(getattr(self, name)) for name in _OF_BLOCKS})

    @property
    def total_seconds(self) -> float:
        """Time of a step."""
        return self.around_seconds + float(self.seconds.sum())

    @property
    def peak(self) -> float:
        """About the most bytes of a step: those between the passes, or in the optimizer's step."""
        return max(self.base + float(self.held.sum()) + self.top, self.update)

    def in_parts(self, parts: int) -> Costs:
        """Return the effect of a change in a step of so many micro-batches, from that in a whole batch.

        Bytes are those of one micro-batch; all of them together take the same time.
        """
        return replace(self, **{name: getattr(self, name) / parts for name in _OF_SAMPLES})

    def cut(self, parts: int, slower: float) -> Costs:
        """Estimate the costs of the step in so many micro-batches, which takes so many times as long.

        All gradients are there from the second micro-batch on.
        """
        gradients = self.top_gradients + float(self.gradients.sum())
        return replace(
            self.in_parts(parts),
            base=self.base + gradients,
            stem=self.stem + gradients,
            end=self.end,
            top_gradients=0.0,
            gradients=np.zeros_like(self.gradients),
            around_seconds=slower * self.around_seconds,
            seconds=slower * self.seconds,
        )

    def in_more_parts(self, parts: int, count: int, there: Costs) -> Costs:
        """Return the costs of the step in so many micro-batches, from those of the whole and those in ``count`` of it.

        Bytes of samples shrink with the micro-batch, and each one more takes the same time more.
        """
        shrunk = there.towards(self.cut(1, 1.0), _share(parts, count), (*_OF_SAMPLES, "update"))
        return shrunk.towards(self, -(parts - count) / (count - 1), ("around_seconds", "seconds"))


AROUND = ("base", "stem", "top", "end", "update", "top_gradients", "around_seconds")
"""Costs that are not of single blocks."""

_OF_BLOCKS = ("held", "forward", "backward", "gradients", "seconds")
_OF_SAMPLES = ("base", "stem", "top", "end", "held", "forward", "backward")


def _share(parts: int, count: int) -> float:
    """Return how much of the way it is from ``count`` micro-batches to the whole batch, by bytes of a micro-batch."""
    return (1 / parts - 1 / count) / (1 - 1 / count)


def change_in_parts(costs: Costs, parts: int, cut: tuple[int, Costs] | None = None) -> Costs:
    """Return the effect of a change around the blocks in so many micro-batches, from that in a whole batch.

    ``cut`` is a number of micro-batches with the effect in that many: the two effects show which bytes do not grow with
    the batch, such as a gradient that a loss in pieces holds. Without ``cut`` all bytes between the passes count as
    growing.
    """
    if cut is None:
        return replace(costs, top=costs.top / parts, held=costs.held / parts, forward=costs.forward / parts)
    count, there = cut
    moved = there.towards(costs, _share(parts, count), ("top", "held", "forward"))
    return replace(costs, base=there.base, top=moved.top, held=moved.held, forward=moved.forward)


@dataclass(frozen=True)
class Effect:
    """What an action does to each block of the whole model.

    Attributes:
        costs: The difference that it makes, of which only that of the blocks is meant.
        keeps_output: Whether each block itself saves what it returns.
        frees_input: Whether each block saves nothing of what it gets as it is, so that it is freed.
        rest: The further difference that it makes where it acts outside of blocks, too; None if it does not.
    """

    costs: Costs
    keeps_output: tuple[bool, ...]
    frees_input: tuple[bool, ...]
    rest: Costs | None = None

    @classmethod
    def of(cls, exact: Measurement, changed: Measurement, blocks: Blocks) -> Effect | None:
        """Return what an action on all blocks does, from a step without and one with it; None if nothing was read."""
        before, read = Costs.of(exact), changed.blocks
        after = Costs.of(changed, like=before)
        if before is None or after is None or read is None or len(after.held) != len(before.held):
            return None
        keeps = tuple(read.blocks[place].keeps_output for place in blocks.places)
        frees = tuple(not read.blocks[place].keeps_input for place in blocks.places)
        return cls((after - before).at(blocks.places), keeps, frees)

    @property
    def block_seconds(self) -> float:
        """The time of all blocks that it takes more."""
        return float(self.costs.seconds.sum())

    @property
    def is_felt(self) -> bool:
        """Whether it changes any bytes or seconds of a block."""
        return bool(np.any(self.costs.held) or np.any(self.costs.backward) or np.any(self.costs.seconds))

    def in_parts(self, parts: int) -> Effect:
        """Return the effect in a step of so many micro-batches."""
        return replace(self, costs=self.costs.in_parts(parts), rest=self.rest and self.rest.in_parts(parts))


@dataclass
class Way:
    """One way of computing, a precision, adapters, a size of micro-batches, with the effects of changes in it.

    Attributes:
        around: What makes it this way of computing.
        parts: How many micro-batches a step has.
        exact: Costs of the step without further changes.
        changes: What each further change around the blocks does.
        actions: What each action does to the blocks.
    """

    around: Action
    parts: int
    exact: Costs
    changes: dict[Action, Costs] = field(default_factory=dict)
    actions: dict[Action, Effect] = field(default_factory=dict)
