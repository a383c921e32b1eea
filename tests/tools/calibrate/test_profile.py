"""What timed operators say: a curve of each, peaks, and what kinds reach."""

from __future__ import annotations

from typing import Any

import pytest

from actbench.simulator.cost.rates import Curve, Surface, published
from actbench.simulator.cost.work import OperatorWork
from actbench.tools.calibrate.profile import (
    Found,
    Sample,
    calibration_table,
    found_in,
    peaks,
    profile_of,
    shares_of_kinds,
)

HOST = dict.fromkeys(("forward", "backward", "optimizer", "view", "packing", "listed"), 2e-6)


def product(flops: int, rate: float, precision: Any = "fp32") -> Sample:
    return Sample(OperatorWork("mm", "matmul", flops=flops, precision=precision, moved=1), flops / rate)


def move(count: int, rate: float, name: str = "relu", kind: str = "elementwise") -> Sample:
    return Sample(OperatorWork(name, kind, moved=count), count / rate)


BASE = [product(10**9, 1e9), move(10**9, 1e10, "copy_"), move(10**9, 4e9, "to_host", "host copy")]


def measured(samples: list[Sample], name: str) -> Curve | Surface:
    """Return what the cost model makes of an operator's points."""
    flops, sizes, seconds = zip(*found_in(samples)[name, "fp32"].points, strict=True)
    return Surface(tuple(zip(flops, sizes, strict=True)), seconds) if flops[0] else Curve(sizes, seconds)


def test_an_operator_is_as_fast_as_it_was_at_the_size_that_is_nearest() -> None:
    curve = measured([move(2**10, 1e6), move(2**20, 1e9), move(2**20, 1e9), move(2**20, 1e3)], "relu")

    assert curve.at(0, 2**10) == pytest.approx(2**10 / 1e6)
    assert curve.at(0, 2**20) == pytest.approx(2**20 / 1e9)  # one that was disturbed does not count
    assert curve.at(0, 2**22) == pytest.approx(2**22 / 1e9)  # at the last rate
    assert curve.at(0, 2**22, rate=3e9) == pytest.approx(2**20 / 1e9 + 3 * 2**20 / 3e9)  # or a rate that is faster
    assert curve.at(0, 2**9) == pytest.approx(2**9 / 1e6)  # at the first
    assert curve.at(0, 1, least=1e-4) == pytest.approx(1e-4)
    assert curve.at(0, 1, least=1.0) == curve.at(0, 2**10)  # no more than what is larger


def test_a_larger_size_takes_no_less_time() -> None:
    curve = measured([move(2**10, 1e3), move(2**16, 1e9)], "relu")

    assert curve.at(0, 2**16) == pytest.approx(curve.at(0, 2**10))


def test_a_product_is_as_fast_as_those_of_its_shape() -> None:
    wide, narrow = (OperatorWork("mm", "matmul", flops=10**9, moved=moved) for moved in (10**6, 10**8))
    surface = measured([Sample(wide, 0.1), Sample(wide, 0.1), Sample(wide, 9.0), Sample(narrow, 0.4)], "mm")

    assert surface.at(10**9, 10**6) == pytest.approx(0.1, rel=0.01)
    assert surface.at(10**9, 10**8) == pytest.approx(0.4, rel=0.01)
    assert surface.at(10**9, 10**7) == pytest.approx(0.2)  # in the middle of both


def test_types_are_apart_and_the_peak_is_that_of_the_best_product() -> None:
    found = found_in([product(10**6, 1e9), product(10**9, 3e9), product(10**9, 5e9, "half"), move(10**6, 1e12)])

    assert peaks(found) == pytest.approx({"fp32": 3e9, "half": 5e9})


def test_a_kind_reaches_a_share_of_the_peak_or_of_the_bandwidth() -> None:
    found = found_in([product(10**9, 3e9), move(10**7, 4e9), move(10**7, 2e9, "gelu"), move(10**7, 1e9, "add")])
    slow = Sample(OperatorWork("bmm", "attention", flops=10**9, moved=1), 2.0)

    kinds = shares_of_kinds({**found, **found_in([slow])}, 4e9)

    assert kinds["matmul"]["fp32"] == 1.0
    assert kinds["attention"]["fp32"] == pytest.approx(0.5e9 / 3e9, rel=1e-3)
    assert kinds["elementwise"]["memory"] == pytest.approx(0.5)


def test_what_is_too_small_for_a_gpu_says_nothing_of_its_rate() -> None:
    tiny = Found("gather", ((0.0, 8e3, 3e-6),))
    large = Found("elementwise", ((0.0, 8e3, 3e-6), (0.0, 8e8, 4e-4)))
    found = {("embedding", "fp32"): tiny, ("add", "fp32"): large}

    on_gpu, on_cpu = shares_of_kinds(found, 4e12, 3e-6), shares_of_kinds(found, 4e12)

    assert on_gpu["elementwise"]["memory"] == on_cpu["elementwise"]["memory"] == pytest.approx(0.5)
    assert on_gpu["gather"]["memory"] == published().kinds["gather"].memory
    assert on_cpu["gather"]["memory"] == pytest.approx(0.001)  # the least share that a profile has


def test_the_table_has_the_rates_of_kinds() -> None:
    table = calibration_table(profile_of(found_in(BASE), HOST, gib=1.0, source="here"), ["left out"])

    rows = {(row["kind"], row["precision"]): (row["giga_per_second"], row["share"]) for row in table.rows}
    assert rows["matmul", "fp32"] == (1.0, 1.0)
    assert rows["elementwise", "bytes"] == (10.0, 1.0)
    assert "2 µs for an operator of the forward pass" in table.notes[1]
    assert table.notes[-1] == "left out"
