"""The time of the host to issue operators: the time of a small model's step beyond that of its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch.utils.benchmark import Timer

from actbench.errors import ActbenchError, told
from actbench.model.records import Phase
from actbench.scheme.setup import TrainStep
from actbench.tools.calibrate.stopwatch import Clock, Sample, Stopwatch
from actbench.tools.calibrate.subjects import SMALL, stepping

_ROUNDS = 5
_LEAST = 1e-7
_LISTED = 4e-7
"""Seconds for each tensor of a list: too short to measure beside the rest."""

Result = TypeVar("Result")


class _Part(NamedTuple):
    """A part of a step: the seconds of neither operators nor views, and how many operators it has."""

    seconds: float
    operators: int
    packing: int


def host_of(device: torch.device, schemes: Sequence[str], clock: Clock, failed: list[str]) -> dict[str, float]:
    """Return the seconds of the host for an operator, by part of the step, and for one that packs.

    The steps have batches so small that little is computed. Schemes that fail are added to ``failed``.
    """
    x = torch.zeros(4, 4, requires_grad=True)
    view = Timer("x.view(16)", globals={"x": x}, timer=clock).blocked_autorange().median
    found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "packing": []}
    for model in SMALL:
        exact = stepping(device, model, "exact")
        parts = _parts(exact.step(model.sizes[0]), device, clock, view)
        own = {phase: max(part.seconds / max(part.operators, 1), _LEAST) for phase, part in parts.items()}
        for phase, seconds in own.items():
            found[phase].append(seconds)
        for subject in (stepping(device, model, spec) for spec in schemes):
            try:
                parts = _parts(subject.step(model.sizes[0]), device, clock, view)
            except ActbenchError:
                continue  # the scheme finds nothing in this model
            except Exception as error:
                failed.append(f"the host in {subject.name}: {told(error)}")
                continue
            packing = {phase: part for phase, part in parts.items() if phase != "optimizer"}
            rest = sum(part.seconds - own[phase] * (part.operators - part.packing) for phase, part in packing.items())
            if count := sum(part.packing for part in packing.values()):
                found["packing"].append(max(rest / count, _LEAST))
    host = {name: median(seconds) for name, seconds in found.items() if seconds}
    return {"packing": host["forward"], **host, "view": view, "listed": _LISTED}


def _parts(step: TrainStep, device: torch.device, clock: Clock, view: float) -> dict[Phase, _Part]:
    """Return the parts of a step; a view takes ``view`` seconds."""

    def timed(run: Callable[[], None]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        run()
        return clock() - begin

    def watched(run: Callable[[], None]) -> tuple[list[Sample], int]:
        with watch:
            run()
        return watch.samples, watch.views

    step()
    watch = Stopwatch(device, clock)
    whole = [_phases(step, timed) for _ in range(_ROUNDS)]
    known = [_phases(step, watched) for _ in range(_ROUNDS)]
    parts: dict[Phase, _Part] = {}
    for phase, (samples, views) in known[0].items():
        # the shortest run of each: between two that are watched, caches are lost; the host runs ahead of a CUDA device
        runs = zip(*([sample.seconds for sample in each[phase][0]] for each in known), strict=True)
        computing = 0.0 if device.type == "cuda" else sum(map(min, runs))
        seconds = median(each[phase] for each in whole) - computing - view * views
        parts[phase] = _Part(seconds, len(samples), sum(sample.work.kind == "packing" for sample in samples))
    return parts


def _phases(step: TrainStep, run: Callable[[Callable[[], None]], Result]) -> dict[Phase, Result]:
    losses: list[torch.Tensor] = []
    return {
        "forward": run(lambda: losses.append(step.forward())),
        "backward": run(lambda: step.backward(losses.pop())),
        "optimizer": run(step.update),
    }
