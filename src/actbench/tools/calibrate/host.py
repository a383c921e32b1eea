"""The time of the host to issue operators: the time of a small model's step beyond that of its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from actbench.model.records import Phase
from actbench.scheme.setup import TrainStep
from actbench.tools.calibrate.steps import SMALL, noting
from actbench.tools.calibrate.stopwatch import Clock, Stopwatch

_ROUNDS = 5
_LEAST = 1e-7
_LISTED = 4e-7
"""Seconds for each tensor of a list: too short to measure beside the rest."""
_PACKING = ("fewbit:3", "actnn:L2", "gact:L1", "randomized:0.2")
_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


def host_of(device: torch.device, clock: Clock, notes: list[str]) -> dict[str, float]:
    """Return the seconds of the host for an operator, by part of the step, and for one that packs.

    They are the solution, by least squares, of one equation for each part of each step: what it takes beyond the time
    of its operators and views is the sum over its operators. The steps have batches so small that little is computed.
    """
    x = torch.zeros(4, 4, requires_grad=True)
    view = Timer("x.view(16)", globals={"x": x}, timer=clock).blocked_autorange().median
    counts: list[list[int]] = []
    seconds: list[float] = []
    for model in SMALL:
        for spec in ("exact", *_PACKING):
            with noting(f"{spec} on {model.name}, the host", notes):
                for counted, taken in _parts(next(model.steps(spec, device)), device, clock, view):
                    counts.append(counted)
                    seconds.append(taken)
    solved = np.linalg.lstsq(np.array(counts), np.array(seconds))[0]
    host = {name: max(float(each), _LEAST) for name, each in zip((*_PHASES, "packing"), solved, strict=True)}
    packing = host["packing"] if any(each[-1] for each in counts) else host["forward"]
    return {**host, "packing": packing, "view": view, "listed": _LISTED}


def _parts(step: TrainStep, device: torch.device, clock: Clock, view: float) -> Iterator[tuple[list[int], float]]:
    """Yield, for each part of a step, how many operators of each unknown it has, and the seconds that they add up to.

    An optimizer's operators that pack call no hook, and count as its others do.
    """
    step()
    whole = np.median([_seconds(step, device, clock) for _ in range(_ROUNDS)], axis=0)
    watch = Stopwatch(device, clock, lambda: step.phase)
    # the shortest run of each operator: between two that are watched, caches are lost
    runs = [watch.time(step) for _ in range(_ROUNDS)]
    shortest = [min(each, key=lambda sample: sample.seconds) for each in zip(*runs, strict=True)]
    for place, (phase, taken) in enumerate(zip(_PHASES, whole, strict=True)):
        own = [each for each in shortest if each.phase == phase]
        kinds = [each.work.kind for each in own]
        views, packing = kinds.count(None), kinds.count("packing") * (phase != "optimizer")
        counted = [0, 0, 0, packing]
        counted[place] = len(own) - views - packing
        # the host runs ahead of a CUDA device, and on a CPU computes itself
        computing = 0.0 if device.type == "cuda" else sum(each.seconds for each in own if each.work.kind)
        yield counted, taken - computing - view * views


def _seconds(step: TrainStep, device: torch.device, clock: Clock) -> list[float]:
    """Return the seconds in which the host issues each part of a step."""
    parts: tuple[Callable[[Any], Any], ...] = (lambda _: step.forward(), step.backward, lambda _: step.update())
    passed, taken = None, []
    for part in parts:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        passed = part(passed)
        taken.append(clock() - begin)
    return taken
