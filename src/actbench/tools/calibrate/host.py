"""The time of the host to issue operators: the time of a small model's step beyond that of its operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple, TypeVar, cast

import torch

from actbench.errors import ActbenchError, MeasurementError, told
from actbench.model.records import Phase
from actbench.scheme.setup import TrainStep
from actbench.tools.calibrate.profile import Found, Key
from actbench.tools.calibrate.records import HostFound
from actbench.tools.calibrate.stopwatch import Clock, Stopwatch
from actbench.tools.calibrate.subjects import STEPS, stepping

_ROUNDS = 5
_VIEWS = 2000
_PACKING = ("fewbit:3", "actnn:L2", "gact:L1", "randomized:0.2")
_LEAST = 1e-7
_LISTED = 4e-7
"""Seconds for each tensor of a list: too short to measure beside the rest."""


Result = TypeVar("Result")


class _Part(NamedTuple):
    """A part of a step: its seconds, the known seconds of its operators, and their number."""

    seconds: float
    computing: float
    operators: int
    packing: int
    views: int

    def left(self, view: float) -> float:
        """Return the seconds of neither operators nor views."""
        return self.seconds - self.computing - view * self.views


class _UnmeasuredError(MeasurementError):
    """A step has operators whose times are unknown."""


def host_of(
    device: torch.device, found: Mapping[Key, Found], clock: Clock, left_out: list[str], failed: list[str]
) -> HostFound:
    """Return the seconds of the host for an operator, from steps on batches so small that little is computed.

    Models with unmeasured operators are added to ``left_out``, failing schemes to ``failed``.

    Raises:
        MeasurementError: Every model has unmeasured operators.
    """
    view = _view(clock)
    each: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "packing": []}
    for settings, batches in STEPS:
        name = settings["model"].partition("@")[0]
        try:
            exact = _parts(stepping(device, settings, "exact")(batches[0]), device, found, clock)
        except _UnmeasuredError as error:
            left_out.append(f"the host on {name} ({error})")
            continue
        own = {phase: max(part.left(view) / max(part.operators, 1), _LEAST) for phase, part in exact.items()}
        for phase, seconds in own.items():
            each[phase].append(seconds)
        for spec in _PACKING if "packing" in {one.kind for one in found.values()} else ():
            try:
                packed = _parts(stepping(device, settings, spec)(batches[0]), device, found, clock)
            except ActbenchError:
                continue  # the scheme finds nothing in this model, or an operator was not measured
            except Exception as error:
                failed.append(f"the host on {name} under {spec}: {told(error)}")
                continue
            parts = [(own[phase], part) for phase, part in packed.items() if phase != "optimizer"]
            rest = sum(part.left(view) - each_own * (part.operators - part.packing) for each_own, part in parts)
            count = sum(part.packing for _, part in parts)
            each["packing"] += [max(rest / count, _LEAST)] if count else []
    if not each["forward"]:
        raise MeasurementError(
            "the times of the host are unknown: every small model has operators that were not measured in time; "
            "give a larger --budget"
        )
    host = {name: median(seconds) for name, seconds in each.items() if seconds}
    return HostFound(**{"packing": host["forward"], **host}, view=view, listed=_LISTED)


def _view(clock: Clock) -> float:
    x = torch.zeros(4, 4, requires_grad=True)
    begin = clock()
    for _ in range(_VIEWS):
        x.view(16)
    return (clock() - begin) / _VIEWS


def _parts(step: TrainStep, device: torch.device, found: Mapping[Key, Found], clock: Clock) -> dict[Phase, _Part]:
    """Return the parts of a step."""
    step()
    runs: list[list[float]] = [_phases(step, device, lambda _, run: _timed(run, device, clock)) for _ in range(_ROUNDS)]
    watch = Stopwatch(device, clock)

    def watched(phase: str, run: Callable[[], None]) -> tuple[float, int, int, int]:
        with watch:
            run()
        works = Counter(sample.work for sample in watch.samples)
        unmeasured = sorted({work.label for work in works if (work.label, work.precision) not in found})
        if unmeasured:
            raise _UnmeasuredError(f"{', '.join(unmeasured)} was not measured")
        known = [(found[work.label, work.precision], work, count) for work, count in works.items()]
        seconds = sum(
            one.measured.at(work.flops, max(work.moved, 1), one.points[0][2]) * count for one, work, count in known
        )
        packing = sum(count for work, count in works.items() if work.kind == "packing")
        # the host runs ahead of a CUDA device
        return 0.0 if device.type == "cuda" else seconds, works.total(), packing, watch.views

    counted = _phases(step, device, watched)
    seconds = [median(times) for times in zip(*runs, strict=True)]
    phases = cast("tuple[Phase, ...]", ("forward", "backward", "optimizer"))
    return {phase: _Part(taken, *rest) for phase, taken, rest in zip(phases, seconds, counted, strict=True)}


def _phases(step: TrainStep, device: torch.device, run: Callable[[str, Callable[[], None]], Result]) -> list[Result]:
    loss: list[torch.Tensor] = []
    return [
        run("forward", lambda: loss.append(step.forward())),
        run("backward", lambda: step.backward(loss.pop())),
        run("optimizer", step.update),
    ]


def _timed(run: Callable[[], None], device: torch.device, clock: Clock) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = clock()
    run()
    return clock() - begin
