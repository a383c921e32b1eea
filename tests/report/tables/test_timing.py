from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from actbench.report.tables.values import SpreadValue, ratio, step_time, throughput

_seconds = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=2, max_size=20)


def test_a_step_is_the_median_and_half_the_interquartile_range() -> None:
    # Quartiles of 1, 2, 3, 4, 10 by linear interpolation are the values themselves: 2, 3 and 4.
    assert step_time([10.0, 1.0, 2.0, 3.0, 4.0]) == SpreadValue(3.0, (4.0 - 2.0) / 2)


def test_one_step_has_no_spread_and_none_has_no_time() -> None:
    assert step_time((0.5,)) == SpreadValue(0.5, None)
    assert step_time(()) is None
    assert step_time(None) is None


def test_throughput_keeps_the_relative_spread_of_the_step() -> None:
    assert throughput(8, SpreadValue(0.5, 0.125)) == SpreadValue(16.0, 16.0 * 0.25)
    assert throughput(8, SpreadValue(0.5)) == SpreadValue(16.0, None)
    assert throughput(8, SpreadValue(0.0)) is None
    assert throughput(8, None) is None


def test_relative_spreads_of_a_ratio_add_as_squares() -> None:
    # 3/8 and 4/8 make 5/8.
    assert ratio(SpreadValue(2.0, 0.75), SpreadValue(4.0, 2.0)) == SpreadValue(0.5, 0.5 * 5 / 8)
    assert ratio(SpreadValue(2.0), SpreadValue(4.0, 0.16)) == SpreadValue(0.5, None)
    assert ratio(None, SpreadValue(1.0)) is None
    assert ratio(SpreadValue(1.0), SpreadValue(0.0)) is None


@given(_seconds, _seconds)
def test_a_ratio_and_its_inverse_agree(above: list[float], below: list[float]) -> None:
    there, back = ratio(step_time(above), step_time(below)), ratio(step_time(below), step_time(above))

    assert there is not None
    assert back is not None
    assert there.value * back.value == pytest.approx(1)
    assert (there.spread or 0) / there.value == pytest.approx((back.spread or 0) / back.value)
