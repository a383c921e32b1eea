"""What timed operators say: a curve of each, peaks, and what kinds reach."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from actbench.simulator.cost.rates import Curve, Surface, efficiencies, published
from actbench.simulator.cost.work import OperatorWork
from actbench.tools.calibrate.profile import operators_of, peaks, points_of, shares
from actbench.tools.calibrate.stopwatch import Sample, Stopwatch

CPU = torch.device("cpu")
near = functools.partial(pytest.approx, rel=1e-3)  # four digits of a time are kept


def product(flops: int, rate: float, precision: Any = "fp32") -> Sample:
    return Sample("forward", OperatorWork("mm", "matmul", flops=flops, precision=precision, moved=1), flops / rate)


def move(count: int, rate: float, name: str = "relu", kind: str = "elementwise") -> Sample:
    return Sample("forward", OperatorWork(name, kind, moved=count), count / rate)


def measured(samples: list[Sample], name: str) -> Curve | Surface:
    """Return what a cost model reads from a profile of these samples."""
    host = dict.fromkeys(("forward", "backward", "view", "packing", "listed", "bandwidth"), 1.0)
    known = published()
    return efficiencies({}, host, known.links, known.overlap, operators=operators_of(points_of(samples))).operators[
        name, "fp32"
    ]


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
    surface = measured(
        [
            Sample("forward", wide, 0.1),
            Sample("forward", wide, 0.1),
            Sample("forward", wide, 9.0),
            Sample("forward", narrow, 0.4),
        ],
        "mm",
    )

    assert surface.at(10**9, 10**6) == pytest.approx(0.1, rel=0.01)
    assert surface.at(10**9, 10**8) == pytest.approx(0.4, rel=0.01)
    assert surface.at(10**9, 10**7) == pytest.approx(0.2)  # in the middle of both


def test_types_are_apart_and_the_peak_is_that_of_the_best_product() -> None:
    points = points_of([product(10**6, 1e12), product(10**9, 3e12), product(10**9, 5e12, "half"), move(10**6, 1e13)])

    assert peaks(points) == pytest.approx({"fp32": 3.0, "half": 5.0})


def test_a_kind_reaches_a_share_of_the_peak_or_of_the_bandwidth() -> None:
    points = points_of([product(10**9, 3e12), move(10**7, 4e9), move(10**7, 2e9, "gelu"), move(10**7, 1e9, "add")])

    tables = shares(points, {"fp32": 6.0}, 4.0, 100.0, on_cuda=False)

    assert tables["matmul"] == near({"fp32": 0.5, "memory": 1.0, "ramp": 233.3})
    assert tables["elementwise"] == near({"memory": 0.5, "ramp": 4900.0})


def test_what_is_too_small_for_a_gpu_says_nothing_of_its_rate() -> None:
    points = points_of(
        [
            Sample("forward", OperatorWork("embedding", "gather", moved=8_000), 3e-6),
            Sample("forward", OperatorWork("add", "elementwise", moved=8_000), 3e-6),
            Sample("forward", OperatorWork("add", "elementwise", moved=800_000_000), 400e-6),
        ]
    )

    on_gpu, on_cpu = (shares(points, {"fp32": 50.0}, 4000.0, 3.0, on_cuda=on_cuda) for on_cuda in (True, False))

    assert on_gpu["elementwise"]["memory"] == on_cpu["elementwise"]["memory"] == pytest.approx(0.5)
    assert on_gpu["gather"]["memory"] == pytest.approx(published().kinds["gather"].memory, rel=1e-3)
    assert on_cpu["gather"]["memory"] == pytest.approx(0.001)  # the least


def test_the_stopwatch_tells_what_ran_and_takes_off_what_watching_takes() -> None:
    x = torch.randn(8, 8)

    found = Stopwatch(CPU, Ticks(), lambda: "backward").time(lambda: (x @ x).view(64).t())

    assert [(each.work.name, each.work.flops) for each in found if each.work.kind] == [("mm", 2 * 8**3)]
    assert sum(each.work.kind is None for each in found) == 2
    assert found[0].seconds < 1.0  # of which the views take as long
    assert {each.phase for each in found} == {"backward"}


def test_the_stopwatch_begins_anew_each_time() -> None:
    watch = Stopwatch(CPU)
    for _ in range(2):
        found = watch.time(lambda: torch.ones(4) + 1)

    assert [each.work.name for each in found] == ["ones", "add"]


def test_the_device_waits_longer_where_the_host_came_too_late(monkeypatch) -> None:
    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            pass

        def query(self):
            return waited[-1] < needed  # cycles in which the host issues all

        def elapsed_time(self, other):
            return 1.0

    waited, needed = [], 1_000_000_000
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append)
    watch = Stopwatch(torch.device("cuda"))

    assert [each.work.name for each in watch.time(lambda: torch.ones(4) + 1)] == ["ones", "add"]
    assert waited == [50_000_000, 200_000_000, 800_000_000, 2_000_000_000]
    needed = 4_000_000_000
    watch.time(lambda: torch.ones(4) + 1)
    assert waited[4:] == [2_000_000_000], "it waits no longer than that, and takes what it has"
