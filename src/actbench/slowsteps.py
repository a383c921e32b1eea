"""Reports simulated steps that take long, as those of a loop over tokens do: what runs in them, and an estimate.

The fake tensor mode calls :func:`operator_ran` for each operator. Nothing is counted outside of :func:`report_to`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from actbench.units import counted, format_seconds

SLOW_SECONDS = 10.0
_OPERATORS_A_LOOK = 64
_OURS = ("actbench", "torch")

Phase = Callable[[], str | None]
"""Returns which part of a step runs: the forward pass is "forward"."""


class SlowSteps:
    """Reports a step that takes long: after ten seconds, and each time that its duration has doubled.

    Args:
        tell: Receives the text.
        clock: Returns seconds.

    Attributes:
        forward_seconds: Of the last whole forward pass.
        step_seconds: Of the last whole step.
    """

    def __init__(self, tell: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self.tell, self.clock = tell, clock
        self.forward_seconds: float | None = None
        self.step_seconds: float | None = None

    @contextmanager
    def following(self, parameters: Iterable[object], phase: Phase | None) -> Iterator[None]:
        """Follow the step that runs inside; see :func:`followed`."""
        step = _Step(self, parameters, phase)
        token = _running.set(step)
        try:
            yield
        finally:
            _running.reset(token)
        if phase is None:
            self.forward_seconds = step.spent
        else:
            self.step_seconds = step.spent


_listening: ContextVar[SlowSteps | None] = ContextVar("_listening", default=None)


@contextmanager
def report_to(tell: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Report the slow steps of a block to ``tell``; see :class:`SlowSteps`."""
    token = _listening.set(SlowSteps(tell, clock))
    try:
        yield
    finally:
        _listening.reset(token)


@contextmanager
def followed(parameters: Iterable[object], phase: Phase | None = None) -> Iterator[None]:
    """Mark a block as one step of a model with these parameters; without ``phase``, as one forward pass."""
    listening = _listening.get()
    if listening is None:
        yield
        return
    with listening.following(parameters, phase):
        yield


def operator_ran(args: Sequence[Any]) -> None:
    """Note that an operator runs on fake tensors, with these arguments."""
    step = _running.get()
    if step is not None:
        step.ran(args)


class _Step:
    """One step: its operators so far, the functions in which they run, and the parameters that were used."""

    def __init__(self, steps: SlowSteps, parameters: Iterable[object], phase: Phase | None) -> None:
        self._steps, self._phase = steps, phase
        self._unused = {id(parameter) for parameter in parameters}
        self._parameters = len(self._unused)
        self._began = steps.clock()
        self._tells_after = SLOW_SECONDS
        self._operators = 0
        self._places: Counter[str] = Counter()
        self._depth = len(list(_callers()))
        self._forward_seconds: float | None = None
        self._forward_operators = 0
        self._has_told = False

    @property
    def spent(self) -> float:
        return self._steps.clock() - self._began

    def ran(self, args: Sequence[Any]) -> None:
        self._operators += 1
        spent = self.spent
        if self._forward_seconds is None:
            if self._phase is None or self._phase() in (None, "forward"):
                self._unused.difference_update(map(id, args))
                if not self._operators % _OPERATORS_A_LOOK:
                    self._look()
            else:
                self._forward_seconds, self._forward_operators = spent, self._operators - 1
        if spent >= self._tells_after:
            self._steps.tell(self._again(spent) if self._has_told else self._first(spent))
            self._tells_after, self._has_told = 2 * spent, True

    def _look(self) -> None:
        """Note the innermost function that is neither torch's nor ours."""
        places = list(_callers())
        inside = places[: len(places) - self._depth]
        place = next((place for package, place in inside if package not in _OURS), None)
        if place is not None:
            self._places[place] += 1

    def _first(self, spent: float) -> str:
        common = self._places.most_common(1)
        mostly = bool(common) and 2 * common[0][1] > self._places.total()
        where = f", most of them in {common[0][0]}" if mostly else ""
        ran = f"{self._ran(spent)}{where}"
        return (
            f"a simulated {self._what} takes long: {ran}. It takes {self._estimate(spent)}. "
            "What runs fewer operators takes less: shorter rows (--sequence-length, --image-size), fewer "
            "layers, or one kernel in place of a loop over tokens"
        )

    def _again(self, spent: float) -> str:
        return f"the simulated {self._what} goes on: {self._ran(spent)}. It takes {self._estimate(spent)}"

    def _ran(self, spent: float) -> str:
        return f"{counted(self._operators, 'operator')} ran in {format_seconds(spent)}"

    @property
    def _what(self) -> str:
        return "step" if self._phase is not None else "forward pass"

    def _estimate(self, spent: float) -> str:
        """Return how long it takes; a backward pass runs at least one operator for each of the forward pass."""
        steps, passes = self._steps, 1 if self._phase is None else 2
        if self._phase is not None and (steps.step_seconds or 0) > spent:
            return f"about as long as the step before, {format_seconds(steps.step_seconds or 0)}"
        if self._forward_seconds is not None:
            backward = self._operators - self._forward_operators
            left = max(0, self._forward_operators - backward) / max(backward, 1)
            return f"at least {format_seconds(spent + left * (spent - self._forward_seconds))} in all"
        least = f"at least {format_seconds(passes * spent)} in all"
        if (steps.forward_seconds or 0) > spent:
            about = passes * (steps.forward_seconds or 0)
            return f"{least}, and about {format_seconds(about)} if this forward pass is like the one before"
        used = 1 - len(self._unused) / max(self._parameters, 1)
        if not 0 < used < 1:
            return least
        return f"{least}, and about {format_seconds(passes * spent / used)} if the layers that are left are like others"


_running: ContextVar[_Step | None] = ContextVar("_running", default=None)


def _callers() -> Iterator[tuple[str, str]]:
    """Yield the package and the place of each function that runs, the innermost first; no frame stays alive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        yield package, f"{code.co_qualname} ({Path(code.co_filename).name})"
        frame = frame.f_back
