"""Loops of many shapes: the peak is that of the whole loop, as torch's allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from loops import LOOPS, dummy_first, plain, step_in_backward, updates_by_hand

import actbench
from actbench.measuring.meters.trace import AllocationTrace
from actbench.tools.script.real import RealRun

FEW = (plain, step_in_backward, dummy_first, updates_by_hand)
"""Loops for the fast tests."""


def peak_of_the_whole(loop: Callable[[], None]) -> int:
    """Return the most bytes that torch's allocator had for a loop at once."""
    gc.collect()
    with AllocationTrace() as trace:
        trace.mark("begun")
        loop()
        trace.mark("ended")
    return trace.peak_bytes("begun", "ended")


def shape(loop: Callable[[], None]) -> object:
    return pytest.param(loop, id=loop.__name__, marks=() if loop in FEW else pytest.mark.slow)


@pytest.mark.parametrize("loop", [shape(each) for each in LOOPS])
def test_the_simulated_peak_is_that_of_the_whole_loop(loop: Callable[[], None]) -> None:
    torch.manual_seed(0)
    true = peak_of_the_whole(loop)

    with actbench.simulate("cpu") as card:
        loop()

    assert card.peak_bytes == pytest.approx(true, rel=2e-3)
    assert len(card.steps.done[-1].forwards) == LOOPS[loop]


@pytest.mark.slow
@pytest.mark.parametrize("loop", [pytest.param(each, id=each.__name__) for each in LOOPS])
def test_real_steps_are_the_simulated_ones(loop: Callable[[], None]) -> None:
    with actbench.simulate("cpu") as card:
        loop()
    gc.collect()
    with RealRun() as run:
        loop()

    assert [len(step.forwards) for step in run.steps.done[: len(card.steps.done)]] == [
        len(step.forwards) for step in card.steps.done
    ]
    assert run.measurement.peak_bytes == pytest.approx(card.peak_bytes, rel=2e-3)
