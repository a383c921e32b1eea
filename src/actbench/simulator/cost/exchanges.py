"""The queue of collectives, which run while a device computes: when each is over, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from actbench.model.records import Phase
from actbench.simulator.cost.collectives import Collective
from actbench.simulator.cost.queues import Turn

# FSDPParamGroup.wait_for_unshard frees a gathered buffer after the next copy-out in the forward pass, else at once
_AHEAD = {"forward": 2, "backward": 1, "optimizer": 1}
"""From which copy of gathered parameters, counted from the last, FSDP2 lets the next begin to be gathered."""


@dataclass
class Exchanges:
    """Collectives run one after the other, since they share the links.

    Parameters are gathered ahead, but no further than FSDP2 lets them: in the forward pass when the last block but one
    has been copied out of its buffer, in the backward pass when the last one has. Gradients are scattered while the
    next block computes; the gradients of that block wait until these are done.

    Attributes:
        time: When all that was given is done.
        busy: Seconds in which something was exchanged.
    """

    seconds: Callable[[Collective], float]
    time: float = 0.0
    busy: float = 0.0
    _over: list[float] = field(default_factory=list)
    _copied: list[float] = field(default_factory=list)
    _scattered: float = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.busy = self._scattered = 0.0
        self._over.clear()
        self._copied.clear()

    def over(self, place: int) -> float:
        """Return when a collective of the step is over, counted from 0."""
        return self._over[place]

    def copied_out(self, now: float) -> None:
        """Note that what was gathered has been copied to where it is used."""
        self._copied.append(now)

    def before(self, found: Collective, turn: Turn) -> float:
        """Return for what the device waits before it gives a collective to the queue: gradients still scattered."""
        return self._scattered if found.kind == "reduce-scatter" and not turn.is_free else 0.0

    def exchange(self, found: Collective, turn: Turn, phase: Phase, host: float, device: float) -> float:
        """Add a collective that the host and the device have got to at these times, and return its seconds."""
        begun = max(self.time, host, self._allowed(phase) if turn.is_free else device)
        taken = self.seconds(found)
        self.time = begun + taken
        self.busy += taken
        self._over.append(self.time)
        if found.kind == "reduce-scatter":
            self._scattered = self.time
        return taken

    def run(self, seconds: float, host: float, phase: Phase) -> None:
        """Let an operator run in this queue."""
        self.time = max(self.time, host, self._allowed(phase)) + seconds

    def _allowed(self, phase: Phase) -> float:
        # before the first copies nothing holds the buffers
        ahead = _AHEAD[phase]
        return self._copied[-ahead] if len(self._copied) >= ahead else 0.0
