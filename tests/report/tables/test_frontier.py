from __future__ import annotations

import math

from hypothesis import given, strategies as st

from actbench.report.tables.groups import Costs, unbeaten

COSTS = st.one_of(st.integers(0, 4), st.floats(-3, 3).map(round), st.sampled_from([math.inf, -math.inf, math.nan]))


def beats(rival: Costs, costs: Costs) -> bool:
    return rival != costs and all(theirs <= ours for theirs, ours in zip(rival, costs, strict=True))


@given(st.lists(st.tuples(COSTS, COSTS), max_size=12))
def test_what_nothing_beats_is_found_as_by_comparing_all_with_all(costs: list[Costs]) -> None:
    assert unbeaten(costs) == [not any(beats(rival, each) for rival in costs) for each in costs]
