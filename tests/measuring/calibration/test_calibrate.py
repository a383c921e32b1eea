"""A machine that is calibrated, with the smallest sizes: the profile can be read, and times are estimated by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.errors import MeasurementError
from actbench.measuring import bench
from actbench.measuring.calibration import calibrate
from actbench.measuring.calibration.calibrate import Calibrated
from actbench.measuring.calibration.profile import toml
from actbench.measuring.meters import profilefile
from actbench.results.records import Case

pytestmark = pytest.mark.slow
CASE = Case(model="tiny-roberta", scheme="fewbit:3", batch_size=4, meter="simulated", device_profile="cpu")


@pytest.fixture(scope="module")
def found() -> Calibrated:
    return calibrate("cpu", schemes=("fewbit:3",), most_sizes=1)


@pytest.fixture
def path(found: Calibrated, tmp_path: Path) -> Path:
    file = tmp_path / "here.toml"
    file.write_text(toml(found.profile))
    return file


def test_the_file_says_what_was_found(found: Calibrated, path: Path) -> None:
    assert profilefile.read(path) == found.profile


def test_operators_of_schemes_are_measured_too(found: Calibrated) -> None:
    operators = found.profile.operators or {}

    assert {"addmm", "mm", "bmm", "convolution_backward", "native_layer_norm", "stepwise_decode"} <= operators.keys()
    assert operators["addmm"].fp32
    assert operators["addmm"].half
    assert "packing" in {kind.kind for kind in found.report.kinds}


def test_a_step_needs_the_memory_of_the_cpu_and_has_a_time(path: Path) -> None:
    plain, timed = (bench.measure(CASE.model_copy(update={"device_profile": name})) for name in ("cpu", str(path)))

    assert timed.estimated is not None
    assert timed.estimated.step_seconds > 0
    assert timed.estimated.unknown == ()
    assert plain.estimated is None
    assert (timed.peak_bytes, timed.peak_parts) == (plain.peak_bytes, plain.peak_parts)
    assert timed.simulated == plain.simulated == "cpu"


def test_time_that_is_too_short_is_told() -> None:
    with pytest.raises(MeasurementError, match=r"mm, copy_ was not measured in 1e-09 s"):
        calibrate("cpu", budget_seconds=1e-9)
