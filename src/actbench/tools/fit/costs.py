"""What a step holds and takes, block by block and around the blocks, in parts that add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from actbench.model.measured import Measurement, Outcome
from actbench.tools.fit.records import step_seconds_of

Floats = NDArray[np.float64]


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
            top = max(peaks.forward_bytes, peaks.backward_bytes)
            none = np.zeros(0)
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
        last = _gradients_of_last(left, [block.kind for block in read.blocks])
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

    def at(self, places: Sequence[int]) -> Costs:
        """Return the costs of a longer model: each of its blocks costs what the block at the given place does."""
        chosen = list(places)
        return replace(self, **{name: getattr(self, name)[chosen] for name in _OF_BLOCKS})

    def grown(self, more: Costs, steps: float) -> Costs:
        """Return these costs with what is around the blocks grown by so many steps of the difference to ``more``."""
        around = {
            each.name: getattr(self, each.name) + steps * (getattr(more, each.name) - getattr(self, each.name))
            for each in fields(self)
            if each.name not in _OF_BLOCKS
        }
        return replace(self, **around)

    @property
    def total_seconds(self) -> float:
        """Time of a step."""
        return self.around_seconds + float(self.seconds.sum())

    @property
    def peak(self) -> float:
        """About the most bytes of a step: those between the passes, or in the optimizer's step."""
        return max(self.base + float(self.held.sum()) + self.top, self.update)

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
        whole, share = self.cut(1, 1.0), (1 / parts - 1 / count) / (1 - 1 / count)
        longer = (parts - count) / (count - 1)
        bytes_of = (*_OF_SAMPLES, "update")
        told = {name: getattr(there, name) + share * (getattr(whole, name) - getattr(there, name)) for name in bytes_of}
        for name in ("around_seconds", "seconds"):
            told[name] = getattr(there, name) + longer * (getattr(there, name) - getattr(self, name))
        return replace(there, **told)

    def of_blocks(self) -> Costs:
        """Return the costs of the blocks alone."""
        return replace(self, base=0.0, stem=0.0, top=0.0, end=0.0, update=0.0, top_gradients=0.0, around_seconds=0.0)

    def of_rest(self) -> Costs:
        """Return the costs outside of the blocks."""
        return replace(self, **{name: np.zeros_like(getattr(self, name)) for name in _OF_BLOCKS})

    def in_parts(self, parts: int) -> Costs:
        """Return the effect of a change in a step of so many micro-batches, from that in a whole batch.

        Bytes are those of one micro-batch; all of them together take the same time.
        """
        return replace(self, **{name: getattr(self, name) / parts for name in _OF_SAMPLES})


_OF_BLOCKS = ("held", "forward", "backward", "gradients", "seconds")
_OF_SAMPLES = ("base", "stem", "top", "end", "held", "forward", "backward")


def _gradients_of_last(left: Floats, kinds: Sequence[str]) -> float:
    """Return the bytes of gradients of the last block: those of the nearest equal one before it, if there is one."""
    for place in range(len(kinds) - 2, -1, -1):
        if kinds[place] == kinds[-1]:
            return float(left[place] - left[place + 1])
    return 0.0
