"""What the host needs is found where operators were measured, and what was not is told."""

from __future__ import annotations

import time

import pytest
import torch

from actbench.errors import MeasurementError
from actbench.tools.calibrate.host import host_of
from actbench.tools.calibrate.profile import Found, Key, found_in
from actbench.tools.calibrate.stopwatch import Stopwatch
from actbench.tools.calibrate.subjects import STEPS, stepping

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def of_images() -> dict[Key, Found]:
    """Return what was measured in a step of the one model that has images."""
    settings, batches = next(each for each in STEPS if "image_size" in each[0])
    step = stepping(CPU, settings, "exact")(batches[0])
    step()
    watch = Stopwatch(CPU)
    with watch:
        step()
    return found_in(watch.samples)


def test_a_model_with_operators_that_were_not_measured_is_left_out(of_images: dict[Key, Found]) -> None:
    left_out: list[str] = []

    host = host_of(CPU, of_images, time.perf_counter, left_out, [])

    assert min(host.forward, host.backward, host.optimizer) > 0
    assert [text.partition(" (")[0] for text in left_out] == ["the host on tiny-roberta", "the host on tiny-llama"]
    assert all("embedding" in text and text.endswith("was not measured)") for text in left_out)


def test_where_no_model_was_measured_more_time_is_asked_for() -> None:
    with pytest.raises(MeasurementError, match="give a larger --budget"):
        host_of(CPU, {}, time.perf_counter, [], [])
