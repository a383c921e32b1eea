"""Where the memory is over a training step: the format of what ``measure --timeline`` adds to a record, in bytes."""

from __future__ import annotations

from typing import Final, Literal, get_args

from actbench.model.data import Data
from actbench.model.records import Phase
from actbench.units import NonNegativeInt

Kind = Literal[
    "weights",
    "gradients",
    "optimizer",
    "saved",
    "packed",
    "cache",
    "engine",
    "batch",
    "kept",
    "communication",
    "temporary",
    "host",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""The kinds in the order of the stack; ``host`` is other memory, and no part of any sum."""

TITLES: Final[dict[Kind, str]] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved tensors",
    "packed": "packed codes",
    "cache": "cache",
    "engine": "inference engine",
    "batch": "batch",
    "kept": "kept from earlier steps",
    "communication": "gathered and reduced",
    "temporary": "temporaries",
    "host": "host memory",
}
"""Titles of the kinds."""

POINTS = 200
"""Most moments of a step in a record."""

HOLDERS = 50
"""Most holders in a record; the rest is one holder for each kind, and for each line of a script that made it."""

LINES = 50
"""Most such holders of the rest with a line."""

SAMPLES = 60
"""Most moments of a step of which a record has the holders."""

SAMPLED_HOLDERS = 100
"""Most holders that these moments name; the rest is as that of the peak."""

MODULE_SPANS = 300
"""Most slices of modules in a record."""

BATCH, OPTIMIZER, OTHER = "<batch>", "<optimizer>", "<other>"
"""Holders that are no modules: the batch, the optimizer's step, and all others."""


class Holds(Data):
    """Who holds memory of one kind, made by one operator: one module, or the same of several blocks.

    Attributes:
        module: Path of the module, ``encoder.layer.*.output`` for the same module of several blocks. For a parameter,
            and memory that belongs to one, it is the parameter's module; else the module that ran when the memory was
            allocated, in the backward pass the module whose operator is differentiated. :data:`BATCH`,
            :data:`OPTIMIZER`, :data:`OTHER` and ``results.ledger.OUTSIDE`` stand for memory of no module.
        operator: The operator that made it, such as ``aten::addmm``; ``parameter`` and the like if older than the step.
        line: The line of the user's script that made it, such as ``train.py:41 logits = model(x)``.
    """

    module: str
    kind: Kind
    operator: str
    line: str | None = None


class Holder(Holds):
    """What somebody holds at the peak.

    Attributes:
        tensors: Number of storages.
        held_bytes: Their bytes, in blocks of the allocator if the meter counts blocks.
    """

    tensors: NonNegativeInt
    held_bytes: NonNegativeInt


class SampledHolder(Holds):
    """What somebody holds over the step, outside of host memory.

    Attributes:
        readings: The bytes, and the number of storages, from a sampled moment on, by the moment's place among them;
            only where they change.
    """

    readings: tuple[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt], ...]


class Span(Data):
    """A part of a step, with the number of events before it."""

    phase: Phase
    start: NonNegativeInt


class ModuleSpan(Data):
    """A stretch of a step in which a module, or one inside it, makes memory.

    Attributes:
        module: Its path.
        start: Number of events before.
        end: Number of events before the first that belongs to another module, or to another part of the step.
    """

    module: str
    start: NonNegativeInt
    end: NonNegativeInt


class Timeline(Data):
    """The bytes alive over one training step in the steady state.

    Time is counted in events: an allocation, a growth or a free. Of more than :data:`POINTS` moments, the record has
    the highest of each group of neighbours, so that the peak is always one.

    Attributes:
        peak_bytes: Most bytes alive; the sum of ``holders`` without those in host memory.
        peak_event: Number of events before the peak.
        events: Number of events of the step.
        moments: Number of events before each point.
        held_bytes: The bytes of each kind at each point; a kind without bytes at any point is left out.
        spans: The parts of the step.
        holders: The holders at the peak, the largest first.
        samples: Number of events before each moment of which the record has all holders; the peak is one. Empty in
            records of older versions.
        sampled: What is held at these moments, in host memory left out: the sum is what is alive.
        modules: The stretches of modules, each before those within it: up to :data:`MODULE_SPANS`, the outermost.
            Empty in records of older versions.
    """

    peak_bytes: NonNegativeInt
    peak_event: NonNegativeInt
    events: NonNegativeInt
    moments: tuple[NonNegativeInt, ...]
    held_bytes: dict[Kind, tuple[NonNegativeInt, ...]]
    spans: tuple[Span, ...]
    holders: tuple[Holder, ...]
    samples: tuple[NonNegativeInt, ...] = ()
    sampled: tuple[SampledHolder, ...] = ()
    modules: tuple[ModuleSpan, ...] = ()

    @property
    def totals(self) -> tuple[int, ...]:
        """The bytes alive at each point, without those in host memory."""
        rows = [amounts for kind, amounts in self.held_bytes.items() if kind != "host"]
        return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * len(self.moments)

    @property
    def peak_phase(self) -> Phase:
        """The part of the step with the peak."""
        return self.phase_at(self.peak_event)

    def phase_at(self, moment: int) -> Phase:
        """Return the part of the step that ran before a moment."""
        return [span.phase for span in self.spans if span.start < moment or span is self.spans[0]][-1]
