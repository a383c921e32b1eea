from __future__ import annotations

from typing import Any

from actbench.tools.fit.leftout import Refusals


def stack(*names: str) -> Any:
    return frozenset(names)


def test_a_refused_stack_excludes_all_that_hold_it_and_nothing_else() -> None:
    refusals = Refusals()
    refusals.refused(stack("a", "b", "c"))

    assert refusals.exclude(stack("a", "b", "c"))
    assert refusals.exclude(stack("a", "b", "c", "d"))
    assert not refusals.exclude(stack("a", "b"))
    assert not refusals.exclude(stack("a", "b", "d"))


def test_the_only_pair_that_was_never_simulated_together_is_refused_everywhere() -> None:
    refusals = Refusals()
    refusals.refused(stack("a", "b", "c"))
    refusals.simulated(stack("a", "b", "d"))
    assert not refusals.exclude(stack("b", "c", "d"))  # a and c, or b and c

    refusals.simulated(stack("a", "c"))
    assert refusals.exclude(stack("b", "c", "d"))
    assert not refusals.exclude(stack("a", "c", "d"))


def test_where_all_pairs_stand_together_only_the_whole_is_excluded() -> None:
    refusals = Refusals()
    for pair in ("ab", "bc", "ac"):
        refusals.simulated(stack(*pair))
    refusals.refused(stack("a", "b", "c"))

    assert refusals.exclude(stack("a", "b", "c", "d"))
    assert not refusals.exclude(stack("a", "b", "d"))


def test_a_choice_that_is_refused_alone_excludes_all_that_hold_it() -> None:
    refusals = Refusals()
    refusals.refused(stack("a"))
    assert refusals.exclude(stack("a", "b"))
    assert not refusals.exclude(stack("b"))
