"""What timed operators say: a curve of each, peaks, and what kinds reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actbench.simulator.cost.rates import published
from actbench.simulator.cost.work import OperatorWork
from actbench.tools.calibrate.profile import Found, by_kind, found_in, peaks
from actbench.tools.calibrate.stopwatch import Sample, Stopwatch

CPU = torch.device("cpu")


def product(flops: int, rate: float, precision: Any = "fp32") -> Sample:
    return Sample(OperatorWork("mm", "matmul", flops=flops, precision=precision, moved=1), flops / rate)


def move(count: int, rate: float, name: str = "relu", kind: str = "elementwise") -> Sample:
    return Sample(OperatorWork(name, kind, moved=count), count / rate)


class Ticks:
    """A clock on which every reading is a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_an_operator_is_as_fast_as_it_was_at_the_size_that_is_nearest() -> None:
    found = found_in([move(2**10, 1e6), move(2**20, 1e9), move(2**20, 1e9), move(2**20, 1e3)])

    curve = found["relu", "fp32"].measured

    assert curve.at(0, 2**10) == pytest.approx(2**10 / 1e6)
    assert curve.at(0, 2**20) == pytest.approx(2**20 / 1e9)  # one that was disturbed does not count
    assert curve.at(0, 2**22) == pytest.approx(2**22 / 1e9)  # at the last rate
    assert curve.at(0, 2**22, rate=3e9) == pytest.approx(2**20 / 1e9 + 3 * 2**20 / 3e9)  # or a rate that is faster
    assert curve.at(0, 2**9) == pytest.approx(2**9 / 1e6)  # at the first
    assert curve.at(0, 1, least=1e-4) == pytest.approx(1e-4)
    assert curve.at(0, 1, least=1.0) == curve.at(0, 2**10)  # no more than what is larger


def test_a_larger_size_takes_no_less_time() -> None:
    curve = found_in([move(2**10, 1e3), move(2**16, 1e9)])["relu", "fp32"].measured

    assert curve.at(0, 2**16) == pytest.approx(curve.at(0, 2**10))


def test_a_product_is_as_fast_as_those_of_its_shape() -> None:
    wide, narrow = (OperatorWork("mm", "matmul", flops=10**9, moved=moved) for moved in (10**6, 10**8))
    surface = found_in([Sample(wide, 0.1), Sample(wide, 0.1), Sample(wide, 9.0), Sample(narrow, 0.4)])[
        "mm", "fp32"
    ].measured

    assert surface.at(10**9, 10**6) == pytest.approx(0.1, rel=0.01)
    assert surface.at(10**9, 10**8) == pytest.approx(0.4, rel=0.01)
    assert surface.at(10**9, 10**7) == pytest.approx(0.2)  # in the middle of both


def test_types_are_apart_and_the_peak_is_that_of_the_best_product() -> None:
    found = found_in([product(10**6, 1e9), product(10**9, 3e9), product(10**9, 5e9, "half"), move(10**6, 1e12)])

    assert peaks(found) == pytest.approx({"fp32": 3e9, "half": 5e9})


def test_a_kind_reaches_a_share_of_the_peak_or_of_the_bandwidth() -> None:
    found = found_in([product(10**9, 3e9), move(10**7, 4e9), move(10**7, 2e9, "gelu"), move(10**7, 1e9, "add")])

    elementwise, matmul = by_kind(found, {"fp32": 6e9}, 4e9)

    assert (matmul.kind, matmul.share) == ("matmul", pytest.approx(0.5))
    assert (elementwise.kind, elementwise.share, elementwise.operators) == ("elementwise", pytest.approx(0.5), 3)


def test_what_is_too_small_for_a_gpu_says_nothing_of_its_rate() -> None:
    tiny = Found("gather", ((0.0, 8e3, 3e-6),))
    large = Found("elementwise", ((0.0, 8e3, 3e-6), (0.0, 8e8, 4e-4)))
    found = {("embedding", "fp32"): tiny, ("add", "fp32"): large}

    on_gpu = {each.kind: each.share for each in by_kind(found, {"fp32": 5e13}, 4e12, 3e-6)}
    on_cpu = {each.kind: each.share for each in by_kind(found, {"fp32": 5e13}, 4e12)}

    assert on_gpu["elementwise"] == on_cpu["elementwise"] == pytest.approx(0.5)
    assert on_gpu["gather"] == published().kinds["gather"].memory
    assert on_cpu["gather"] == pytest.approx(8e3 / 3e-6 / 4e12)


def test_the_stopwatch_tells_what_ran_and_takes_off_what_watching_takes() -> None:
    watch = Stopwatch(CPU, Ticks())
    x = torch.randn(8, 8)

    with watch:
        (x @ x).view(64).t()

    assert [(sample.work.name, sample.work.flops) for sample in watch.samples] == [("mm", 2 * 8**3)]
    assert watch.views == 2
    assert watch.samples[0].seconds < 1.0  # of which the views take as long


def test_the_stopwatch_begins_anew_each_time() -> None:
    watch = Stopwatch(CPU)
    for _ in range(2):
        with watch:
            torch.ones(4) + 1

    assert [sample.work.name for sample in watch.samples] == ["ones", "add"]


def test_the_device_waits_longer_where_the_host_came_too_late(monkeypatch) -> None:
    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            pass

        def query(self):
            return waited[-1] < 1_000_000_000  # the host needs as long

        def elapsed_time(self, other):
            return 1.0

    waited = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append)
    watch = Stopwatch(torch.device("cuda"))
    late = []
    for _ in range(4):
        with watch:
            torch.ones(4) + 1
        late.append(watch.is_late)

    assert late == [True, True, True, False]
    assert waited == [50_000_000, 200_000_000, 800_000_000, 2_000_000_000]
