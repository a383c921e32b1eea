"""Where the memory is over a training step: the shape of what ``measure --timeline`` adds to a record, in bytes."""

from __future__ import annotations

from typing import Final, Literal, get_args

from actbench.results.records import Data, Phase
from actbench.units import NonNegativeInt

Kind = Literal["weights", "gradients", "optimizer", "saved", "packed", "batch", "communication", "temporary", "host"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""In the order in which they are stacked; ``host`` is other memory, and no part of any sum."""

TITLES: Final[dict[Kind, str]] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved tensors",
    "packed": "packed codes",
    "batch": "batch",
    "communication": "gathered and reduced",
    "temporary": "temporaries",
    "host": "host memory",
}
"""What people are told of the kinds."""

POINTS = 200
"""Moments of a step that a record holds at most."""

HOLDERS = 50
"""Holders that a record names at most; the rest is one for each kind."""

BATCH, OPTIMIZER, OTHER = "<batch>", "<optimizer>", "<other>"
"""Who holds what no module does: the batch, the step of the optimizer, all that is not named."""


class Holder(Data):
    """What one module, or the same one of several blocks, holds at the peak, of one kind and made by one operator.

    Attributes:
        module: Path of the module, ``encoder.layer.*.output`` where several blocks hold something: of the parameter
            that it is, or that it belongs to; or of the module that ran when it was made, in the backward pass the one
            whose operator is differentiated. :data:`BATCH`, :data:`OPTIMIZER`, :data:`OTHER` and
            ``results.ledger.OUTSIDE`` stand for what no module holds.
        operator: What made it, such as ``aten::addmm``; of what was there before the step what it is: ``parameter``.
        tensors: Storages.
        held_bytes: Their bytes, in blocks of the allocator where the meter counts those.
    """

    module: str
    kind: Kind
    operator: str
    tensors: NonNegativeInt
    held_bytes: NonNegativeInt


class Span(Data):
    """A part of a step, by the events before its beginning."""

    phase: Phase
    start: NonNegativeInt


class Timeline(Data):
    """The bytes alive over one training step in the steady state.

    Time is counted in events: what is allocated, grows or is freed. Of more than :data:`POINTS` moments those are here
    that are the highest of their neighbours, so that the peak is always one.

    Attributes:
        peak_bytes: Most bytes alive; ``holders`` but those in host memory add up to it.
        peak_event: After how many events that was.
        events: How many there were.
        moments: After how many events each point is.
        held_bytes: For each kind the bytes at each point; kinds of which there is nothing at any are left out.
        spans: The parts of the step.
        holders: Who holds what at the peak, the largest first.
    """

    peak_bytes: NonNegativeInt
    peak_event: NonNegativeInt
    events: NonNegativeInt
    moments: tuple[NonNegativeInt, ...]
    held_bytes: dict[Kind, tuple[NonNegativeInt, ...]]
    spans: tuple[Span, ...]
    holders: tuple[Holder, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """The bytes alive at each point, without those in host memory."""
        rows = [amounts for kind, amounts in self.held_bytes.items() if kind != "host"]
        return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * len(self.moments)

    @property
    def peak_phase(self) -> Phase:
        """The part of the step in which the peak is."""
        return [span.phase for span in self.spans if span.start < self.peak_event or span is self.spans[0]][-1]

    @property
    def host_bytes(self) -> int:
        """Bytes that lie in host memory at the peak."""
        return sum(holder.held_bytes for holder in self.holders if holder.kind == "host")
