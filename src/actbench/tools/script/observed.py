"""What a simulation and a real run share: the steps of a script, and what it holds when the largest ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from actbench.measuring.meters.peak import Event
from actbench.measuring.meters.stepevents import Origin
from actbench.model.measured import Measurement
from actbench.scheme import Scheme
from actbench.tools.script.scriptrun import ScriptRun
from actbench.tools.script.steps import reading
from actbench.tools.script.steps.batches import Batches
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.events import Bytes
from actbench.tools.script.steps.growth import with_growth
from actbench.tools.script.steps.keepers import Keepers
from actbench.tools.script.steps.reading import Held
from actbench.tools.script.steps.remarks import about_steps
from actbench.tools.script.steps.schemes import Applied
from actbench.tools.script.steps.steps import Steps
from actbench.tools.script.steps.untrained import Untrained
from actbench.tools.script.whole import Whole


class Counted(reading.Names, Protocol):
    """Memory that is counted."""

    @property
    def events(self) -> Sequence[Event]:
        """All events so far."""


class ObservedRun(ScriptRun):
    """A block around a script's training steps; it reads what the script holds when one ends.

    Args:
        scheme: Is applied to the models when the first step has ended; None for none.
        batch_size: Rows of the batches of each DataLoader; None for its own.
        needs_batches: Whether a script that trains without a DataLoader is refused when its first step has ended.
        options: Those of :class:`~actbench.tools.script.scriptrun.ScriptRun`.
    """

    def __init__(
        self,
        *,
        scheme: Scheme | None = None,
        batch_size: int | None = None,
        needs_batches: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.notes: dict[str, None] = {}
        self._applied = None if scheme is None else Applied(scheme)
        self._began = 1 if scheme is None else 2  # steps until one has begun with optimizer state
        self._batches = Batches(batch_size, are_needed=needs_batches)
        self._held: Held | None = None
        self._of_largest: Held | None = None  # a later step may hold other state, as after a resume
        self.lines.fed, self.lines.ran = self._batches.fed, self._ran

    def _observe(self, steps: Steps, counted: Counted, *, whole: bool, is_cut: bool) -> None:
        """Observe steps, whose memory is counted; of a ``whole`` run all parts, cut where its steps repeat."""
        self.steps, self._counted = steps, counted
        steps.models = lambda: self.lines.roots
        self._whole = Whole(steps, self.lines.line, self._began, is_cut=is_cut, note=self.note) if whole else None
        self._untrained = Untrained(steps, self.lines, self._holds)
        self._keepers = Keepers(counted, self.lines)

    def note(self, text: str) -> None:
        """Note a remark on the figures, once."""
        self.notes[text] = None

    def _holds(self) -> Held:
        return reading.held(self._counted, self.lines, self.steps.optimizers)

    def _has_run(self) -> bool:
        return self._untrained.held is not None

    def _ran(self) -> None:
        self._untrained.ran()
        if self._whole is not None:
            self._whole.ran()

    def _hold(self, step: Step) -> None:
        """Note what is held at the end of a step."""
        self._held = self._holds() if self.steps.trains else self._untrained.held
        if self._held is None:
            return
        if self.steps.largest(self._began) is step:
            self._of_largest = self._held
        self._keepers.look(self.steps.done[self._began :], self._counted.events, self._held.of_model)

    @property
    def _is_unapplied(self) -> bool:
        return self._applied is not None and not self._applied.setups

    def _apply(self) -> None:
        assert self._applied is not None
        self._applied.apply(self.lines.roots, optimizers := self.steps.optimizers)
        self.steps.hand_over(optimizers)

    def _note_steps(self) -> None:
        """Note remarks on the steps."""
        has_state = self._applied is not None and self._applied.keeps_state
        for text in about_steps(self.steps, self._began, has_state=has_state, whole=self._whole is not None):
            self.note(text)

    def _grown(self, found: Measurement, held: Held, origins: Mapping[int, Origin], seen: Bytes | None) -> Measurement:
        """Return a measurement with what steps leave, or with the parts of a whole run, whose bytes are ``seen``."""

        def grown(steps: Sequence[Step]) -> Measurement:
            return with_growth(found, steps, self._counted.events, origins, held.of_model, self._keepers.found)

        if self._whole is None or seen is None:
            return grown(self.steps.steady(self._began))
        return self._whole.with_events(grown, seen)

    def _has_reached(self, limit: int | None) -> bool:
        return limit is not None and len(self.steps.done) >= self._began - 1 + limit
