"""What timed operators say: a curve of each, peaks, and what kinds reach."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from actbench.simulator.cost.rates import Curve, Surface, efficiencies, published
from actbench.simulator.cost.work import OperatorWork
from actbench.tools.calibrate.profile import Found, Key, found_in, peaks, shares
from actbench.tools.calibrate.stopwatch import Sample, Stopwatch

CPU = torch.device("cpu")
near = functools.partial(pytest.approx, rel=1e-3)  # four digits of a time are kept


def product(flops: int, rate: float, precision: Any = "fp32") -> Sample:
    return Sample(OperatorWork("mm", "matmul", flops=flops, precision=precision, moved=1), flops / rate)


def move(count: int, rate: float, name: str = "relu", kind: str = "elementwise") -> Sample:
    return Sample(OperatorWork(name, kind, moved=count), count / rate)


def measured(samples: list[Sample], name: str) -> Curve | Surface:
    """Return what a cost model reads from a profile of these samples."""
    points = found_in(samples)[name, "fp32"].points
    host = dict.fromkeys(("forward", "backward", "view", "packing", "listed", "bandwidth"), 1.0)
    known = published()
    operators = {name: {"fp32": points}}
    return efficiencies({}, host, known.links, known.overlap, operators=operators).operators[name, "fp32"]


class Ticks:
    """A clock on which every reading is a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_an_operator_is_as_fast_as_it_was_at_the_size_that_is_nearest() -> None:
    curve = measured([move(2**10, 1e6), move(2**20, 1e9), move(2**20, 1e9), move(2**20, 1e3)], "relu")

    assert curve.at(0, 2**10) == near(2**10 / 1e6)
    assert curve.at(0, 2**20) == near(2**20 / 1e9)  # one that was disturbed does not count
    assert curve.at(0, 2**22) == near(2**22 / 1e9)  # at the last rate
    assert curve.at(0, 2**22, rate=3e9) == near(2**20 / 1e9 + 3 * 2**20 / 3e9)  # or a rate that is faster
    assert curve.at(0, 2**9) == near(2**9 / 1e6)  # at the first
    assert curve.at(0, 1, least=1e-4) == pytest.approx(1e-4)
    assert curve.at(0, 1, least=1.0) == curve.at(0, 2**10)  # no more than what is larger


def test_a_larger_size_takes_no_less_time() -> None:
    curve = measured([move(2**10, 1e3), move(2**16, 1e9)], "relu")

    assert curve.at(0, 2**16) == near(curve.at(0, 2**10))


def test_a_product_is_as_fast_as_those_of_its_shape() -> None:
    wide, narrow = (OperatorWork("mm", "matmul", flops=10**9, moved=moved) for moved in (10**6, 10**8))
    surface = measured([Sample(wide, 0.1), Sample(wide, 0.1), Sample(wide, 9.0), Sample(narrow, 0.4)], "mm")

    assert surface.at(10**9, 10**6) == pytest.approx(0.1, rel=0.01)
    assert surface.at(10**9, 10**8) == pytest.approx(0.4, rel=0.01)
    assert surface.at(10**9, 10**7) == pytest.approx(0.2)  # in the middle of both


def test_types_are_apart_and_the_peak_is_that_of_the_best_product() -> None:
    found = found_in([product(10**6, 1e12), product(10**9, 3e12), product(10**9, 5e12, "half"), move(10**6, 1e13)])

    assert peaks(found) == pytest.approx({"fp32": 3.0, "half": 5.0})


def test_a_kind_reaches_a_share_of_the_peak_or_of_the_bandwidth() -> None:
    found = found_in([product(10**9, 3e12), move(10**7, 4e9), move(10**7, 2e9, "gelu"), move(10**7, 1e9, "add")])

    tables = shares(found, {"fp32": 6.0}, 4.0, 100.0, on_cuda=False)

    assert tables["matmul"] == near({"fp32": 0.5, "memory": 1.0, "ramp": 233.3})
    assert tables["elementwise"] == near({"memory": 0.5, "ramp": 4900.0})


def test_what_is_too_small_for_a_gpu_says_nothing_of_its_rate() -> None:
    found: dict[Key, Found] = {
        ("embedding", "fp32"): Found("gather", ((8e3, 3.0),)),
        ("add", "fp32"): Found("elementwise", ((8e3, 3.0), (8e8, 400.0))),
    }

    on_gpu, on_cpu = (shares(found, {"fp32": 50.0}, 4000.0, 3.0, on_cuda=on_cuda) for on_cuda in (True, False))

    assert on_gpu["elementwise"]["memory"] == on_cpu["elementwise"]["memory"] == pytest.approx(0.5)
    assert on_gpu["gather"]["memory"] == pytest.approx(published().kinds["gather"].memory, rel=1e-3)
    assert on_cpu["gather"]["memory"] == pytest.approx(0.001)  # the least


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
