"""What is counted in each step of a training script, and by what: moments are numbers of events that grow."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from actbench.device.patches import replaced
from actbench.model.measured import RunPart
from actbench.model.records import Phase
from actbench.simulator.cost.recorder import Done
from actbench.simulator.tracker import StorageTracker

_ALIKE = 1e-4
"""The share of the bytes in which equal steps may differ."""

_LITTLE = 1e-6
"""The share of the bytes by which a step has to grow for anybody to care."""


_collect = gc.collect  # a script that calls it leaves nothing to be found

LOADS: tuple[RunPart, ...] = ("load", "resume")
"""Parts of a run that are one where they follow each other: what reads a file, and what takes over what was read."""


@dataclass
class Span:
    """A part of a run that is no part of a step, by numbers of events of the tracker.

    Attributes:
        begun: Events before it; ``ended`` those before its end.
        batches: Events when each of its batches was loaded; of a span that ``follows``, when a model had run.
        line: The line of the script that began it.
        of: How many batches its loader has; None if unknown.
        follows: The evaluation whose outputs it works on.
        has_graph: Whether gradients are recorded in it.
        ends_lowest: Whether it ends where the fewest bytes are alive until ``ended``, as the next one begins there.
    """

    part: RunPart
    line: str
    begun: int
    ended: int = 0
    batches: list[int] = field(default_factory=list)
    of: int | None = None
    follows: Span | None = None
    has_graph: bool = False
    ends_lowest: bool = False


@dataclass
class Step:
    """One step, by numbers of events of the tracker.

    Attributes:
        begun: Events before the step; ``ended`` those before its end, ``updating`` before the optimizer's part.
        forwards: The beginning and the end of each forward pass.
        peak_bytes: Most bytes alive; ``live_bytes`` are those at the end.
        peak_at: Events before the peak.
        gradients: Names of the storages of gradients, which have ``gradients_bytes``.
        done: What the operators did.
        cyclic_bytes: What reference cycles held at the end, until Python's collector ran; 0 where ``collected`` tells.
        collected: Events before and after each time that the collector ran.
        rows: Rows of its largest batch; None if unknown.
        spans: What ran before its first pass and is no part of it.
    """

    begun: int
    updating: int = 0
    ended: int = 0
    forwards: list[tuple[int, int]] = field(default_factory=list)
    peak_bytes: int = 0
    peak_at: int = 0
    live_bytes: int = 0
    gradients: set[int] = field(default_factory=set)
    gradients_bytes: int = 0
    cyclic_bytes: int = 0
    collected: list[tuple[int, int]] = field(default_factory=list)
    rows: int | None = None
    spans: list[Span] = field(default_factory=list)
    done: Sequence[Done] = ()

    def is_like(self, other: Step) -> bool:
        """Return whether another step reached about the same peak and left about the same bytes.

        A loss that one step in two keeps, or a batch with one token more, makes no other step.
        """
        pairs = ((self.peak_bytes, other.peak_bytes), (self.live_bytes, other.live_bytes))
        return all(abs(one - another) <= _ALIKE * max(one, another) for one, another in pairs)

    def has_grown_from(self, other: Step) -> bool:
        """Return whether it left a little more than another step: whether a third one does, too, is worth a step."""
        return _LITTLE * self.live_bytes < self.live_bytes - other.live_bytes


class Counting(Protocol):
    """Counts what a script allocates, and knows moments by numbers that grow.

    Attributes:
        is_cuda: Whether optimizers take their default implementations for CUDA parameters.
    """

    is_cuda: bool

    def now(self, part: Phase) -> int:
        """Return the number of this moment, at which a part of the step ends."""

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory that is not counted."""

    def gradients(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Note gradients that an optimizer has used in a step."""

    def end(self, step: Step) -> None:
        """Fill in what is known of a step when it ends, after Python's collector ran."""

    def begin(self) -> int:
        """Begin the next step, whose peak begins at the bytes of now, and return the number of this moment."""


class Tracked(Counting):
    """Counts by the events of a tracker of storages."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self.is_cuda = tracker.host_is_free
        self._collected: list[tuple[int, int]] = []
        self._collecting = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block, note when Python's collector runs by itself, as fake tensors let it do often."""

        def runs(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                self._collecting = len(self._tracker.events)
            elif self._collecting < len(self._tracker.events):
                self._collected.append((self._collecting, len(self._tracker.events)))

        def asked(own: Callable[..., int]) -> Callable[..., int]:
            def collect(*generation: int, **named: int) -> int:
                before = len(self._collected)
                found = own(*generation, **named)
                del self._collected[before:]
                return found

            return collect

        gc.callbacks.append(runs)
        try:
            with replaced(gc, "collect", asked):
                yield
        finally:
            gc.callbacks.remove(runs)

    def now(self, part: Phase = "forward") -> int:
        """Return the number of events; a sum of gradients that waits to be counted is counted now."""
        assert self._tracker.live_bytes >= 0
        return len(self._tracker.events)

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory, and not on a card."""
        return self._tracker.leaves_out(tensor)

    def gradients(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Note the names of gradients."""
        step.gradients |= self._tracker.names(gradients)

    def end(self, step: Step) -> None:
        """Read the tracker before and after Python's collector ran."""
        tracker = self._tracker
        self.now("forward")  # what waits to be counted was there before the collector ran
        _collect()
        step.live_bytes, step.ended = tracker.live_bytes, len(tracker.events)
        step.collected, self._collected = self._collected, []
        step.peak_bytes, step.peak_at = tracker.peak_bytes, tracker.peak_at

    def begin(self) -> int:
        """Begin a new peak."""
        self._tracker.reset_peak()
        return self.now()
