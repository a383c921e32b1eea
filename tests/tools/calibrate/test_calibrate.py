"""A machine that is calibrated, with the smallest sizes: the profile can be read, and times are estimated by it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench.errors import MeasurementError
from actbench.measuring import bench
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.tools.calibrate import steps
from actbench.tools.calibrate.calibrate import Calibrated, calibrate
from actbench.tools.calibrate.profile import toml
from actbench.tools.calibrate.steps import ENCODER, NETWORK
from actbench.tools.calibrate.stopwatch import Sample

CPU = torch.device("cpu")

CASE = Case(model="tiny-roberta", scheme="fewbit:3", batch_size=4, meter="simulated", device_profile="cpu")


@pytest.fixture(scope="module")
def found() -> Calibrated:
    return calibrate("cpu", schemes=("fewbit:3",), budget_seconds=1800)


@pytest.fixture
def path(found: Calibrated, tmp_path: Path) -> Path:
    file = tmp_path / "here.toml"
    file.write_text(toml(found.profile))
    return file


@pytest.mark.exhaustive
def test_the_file_says_what_was_found(found: Calibrated, path: Path) -> None:
    assert profiles.read_device_table(path) == found.profile


@pytest.mark.exhaustive
def test_operators_of_schemes_are_measured_too(found: Calibrated) -> None:
    operators = found.profile.operators or {}

    assert {"addmm", "mm", "bmm", "native_layer_norm", "stepwise_decode"} <= operators.keys()
    assert {"convolution_backward", "convolution_backward with channels last"} <= operators.keys()
    assert {"depthwise convolution", "grouped convolution", "silu", "native_batch_norm"} <= operators.keys()
    assert operators["addmm"].fp32
    assert operators["addmm"].half
    assert "packing" in (found.profile.efficiencies or {})


@pytest.mark.exhaustive
def test_a_step_needs_the_memory_of_the_cpu_and_has_a_time(path: Path) -> None:
    plain, timed = (bench.measure(CASE.model_copy(update={"device_profile": name})) for name in ("cpu", str(path)))

    assert timed.estimated is not None
    assert timed.estimated.step_seconds > 0
    assert timed.estimated.unknown == ()
    assert plain.estimated is None
    assert (timed.peak_bytes, timed.peak_parts) == (plain.peak_bytes, plain.peak_parts)
    assert timed.simulated == plain.simulated == "cpu"


@pytest.mark.slow
def test_time_that_is_too_short_is_told() -> None:
    with pytest.raises(MeasurementError, match=r"no matrix product was measured in 1e-09 s; give a larger --budget"):
        calibrate("cpu", budget_seconds=1e-9)


@pytest.mark.slow
def test_a_scheme_that_fails_is_noted_and_a_plain_operator_is_not_let_off(monkeypatch: pytest.MonkeyPatch) -> None:
    known = steps.Model.steps

    def broken(model: steps.Model, spec: str, device: torch.device) -> Any:
        if spec == failing:
            raise NotImplementedError("no kernel image is available")
        return known(model, spec, device)

    def run() -> tuple[list[Sample], list[str]]:
        planned = [("adamfp8", (ENCODER,)), ("exact", (ENCODER,))]
        return steps.run(planned, CPU, time.perf_counter, time.monotonic() + 60, lambda text: None)

    monkeypatch.setattr(steps.Model, "steps", broken)
    failing = "adamfp8"
    samples, notes = run()

    assert samples
    assert notes == [
        "Not measured, because it failed: adamfp8 on tiny-roberta: NotImplementedError: no kernel image is available."
    ]
    failing = "exact"
    with pytest.raises(NotImplementedError):
        run()


def test_what_the_time_did_not_reach_is_noted() -> None:
    planned = [("exact", (ENCODER, NETWORK)), ("fewbit:3", (ENCODER,)), ("smaq", (ENCODER,))]

    samples, notes = steps.run(planned, CPU, time.perf_counter, time.monotonic() - 1, lambda text: None)

    assert (samples, notes) == (
        [],
        ["The time ended before these were measured at every size: exact, fewbit:3, smaq."],
    )
