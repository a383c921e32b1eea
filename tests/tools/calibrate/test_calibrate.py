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
from actbench.simulator.profiles import DeviceTable
from actbench.tools.calibrate import calibrate as calibration
from actbench.tools.calibrate.calibrate import Operators, calibrate, seconds_of
from actbench.tools.calibrate.profile import toml
from actbench.tools.calibrate.subjects import Subject, subjects

CASE = Case(model="tiny-roberta", scheme="fewbit:3", batch_size=4, meter="simulated", device_profile="cpu")


@pytest.fixture(scope="module")
def profile() -> DeviceTable:
    found, _ = calibrate("cpu", schemes=("fewbit:3",), most_sizes=1)
    return found


@pytest.fixture
def path(profile: DeviceTable, tmp_path: Path) -> Path:
    file = tmp_path / "here.toml"
    file.write_text(toml(profile))
    return file


@pytest.mark.exhaustive
def test_the_file_says_what_was_found(profile: DeviceTable, path: Path) -> None:
    assert profiles.read_device_table(path) == profile


@pytest.mark.exhaustive
def test_operators_that_pack_are_measured_too(profile: DeviceTable) -> None:
    operators = profile.operators or {}

    assert {"addmm", "mm", "bmm", "native_layer_norm", "stepwise_decode"} <= operators.keys()
    assert {"convolution_backward", "convolution_backward with channels last"} <= operators.keys()
    assert operators["addmm"].fp32
    assert operators["addmm"].half
    assert "packing" in (profile.efficiencies or {})
    assert profile.host is not None
    assert min(profile.host.forward, profile.host.backward, profile.host.view, profile.host.packing) > 0


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
def test_a_time_that_is_too_short_is_refused() -> None:
    with pytest.raises(MeasurementError, match=r"mm, copy_, to_host, add was not measured in 1e-09 s"):
        calibrate("cpu", budget_seconds=1e-9)


@pytest.mark.slow
def test_what_a_device_lacks_is_noted_and_a_fault_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(error: Exception, *, is_step: bool) -> None:
        def run(size: int) -> None:
            raise error

        broken = Subject("adamfp8 on a small model", run, ((1,),), is_step)
        monkeypatch.setattr(calibration, "subjects", lambda *given: [broken, *subjects(*given)])

    lacking(NotImplementedError("no kernel image"), is_step=True)
    _, notes = calibrate("cpu", schemes=("fewbit:3",), most_sizes=1)
    assert notes == ("Not measured at every size: adamfp8 on a small model (NotImplementedError: no kernel image).",)

    lacking(ZeroDivisionError(), is_step=False)
    with pytest.raises(ZeroDivisionError):
        calibrate("cpu", schemes=(), most_sizes=1)


@pytest.mark.parametrize(("device", "last"), [("cpu", "optimizers"), ("cuda", "smaq on tiny-roberta")])
def test_half_types_come_before_schemes_where_they_are_fast(device: str, last: str) -> None:
    names = [subject.name for subject in subjects(torch.device(device), ("smaq",))]

    assert names[-1] == last
    assert names.count("attention") == 2
    assert names.count("convolutions") == (2 if device == "cuda" else 1)


def test_operators_are_listed_with_their_work_and_times() -> None:
    x = torch.randn(8, 8)

    with Operators(lambda call, *, is_backward: 2.0 if is_backward else 1.0) as operators:
        (x @ x).view(64).t()
        torch.ops.aten.gelu_backward(x, x)

    samples = [(sample.work.name, sample.work.flops, sample.seconds) for sample in operators.samples]
    assert samples == [("mm", 2 * 8**3, 1.0), ("gelu_backward", 0, 2.0)]
    assert [work.kind for work in operators.works].count(None) == 2  # views


def test_one_disturbed_call_does_not_count() -> None:
    ticks = iter([0.0, 1.0, 1.0, 9.0, *(9.0 + tick for place in range(8) for tick in (2 * place, 2 * place + 1))])

    assert seconds_of(lambda: None, lambda: next(ticks), is_cuda=False) == 1.0


def test_the_device_waits_longer_where_the_host_came_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, **_: Any) -> None:
            pass

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return waited[-1] < 1_000_000_000  # the host needs as long

        def elapsed_time(self, other: Event) -> float:
            return float(waited[-1])

    waited: list[int] = []
    monkeypatch.setattr(calibration, "_MOST_CALLS", 1)
    monkeypatch.setattr(calibration, "_LEAST_CALLS", 1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append)

    seconds = seconds_of(lambda: None, time.perf_counter, is_cuda=True)

    assert waited == [2_000_000, 8_000_000, 32_000_000, 128_000_000, 512_000_000, 2_000_000_000]
    assert seconds == 2_000_000  # milliseconds of the last one alone
