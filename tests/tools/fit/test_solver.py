"""The solver against all plans of small chains, and against counts of actions where blocks are equal."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from actbench.tools.fit import solver
from actbench.tools.fit.solver import Chain, Option, least_peak, solve

ACTIONS = 5
INSTANCES = 200


def a_chain(seed: int, blocks: int = 6) -> Chain:
    """Return a small chain; every other has pair terms, every third bytes and seconds with fractions."""
    chance = random.Random(seed)
    draw = chance.uniform if seed % 3 == 0 else chance.randint
    options = [
        [
            Option(draw(0, 30), draw(0, 60), draw(0, 60), draw(0, 20), chance.choice([0, 0, draw(0, 10)]))
            for _ in range(ACTIONS)
        ]
        for _ in range(blocks)
    ]
    keys = list(itertools.product(range(ACTIONS), repeat=2))
    pairs = [{key: draw(-10, 10) for key in chance.sample(keys, 5)} for _ in range(blocks - 1)] if seed % 2 else []
    gradients = [draw(0, 10) for _ in range(blocks)]
    return Chain(options, pairs, draw(0, 50), draw(0, 60), gradients, draw(0, 5), draw(0, 100), draw(0, 3))


class Everything:
    """All plans of a chain of at least two blocks, with their peaks, seconds and errors, as the definitions say."""

    def __init__(self, chain: Chain) -> None:
        self.plans = np.array(list(itertools.product(range(ACTIONS), repeat=len(chain.options))))
        count = len(self.plans)
        held, top = np.full(count, math.ceil(chain.base)), math.ceil(chain.gradients_of_top)
        peaks = np.full(count, math.ceil(chain.least))
        self.seconds, self.errors = np.full(count, chain.seconds), np.zeros(count)
        for place, options in enumerate(chain.options):
            taken = self.plans[:, place]
            more = np.zeros((ACTIONS, ACTIONS), int)
            if place and chain.pairs:
                for key, value in chain.pairs[place - 1].items():
                    more[key] = math.ceil(value)
            beside = more[self.plans[:, place - 1], taken] if place else 0
            forward, backward, holds = (
                np.array([math.ceil(getattr(each, name)) for each in options])[taken] + beside
                for name in ("forward", "backward", "held")
            )
            gradients = top + sum(math.ceil(each) for each in chain.gradients[place + 1 :])
            peaks = np.maximum(peaks, held + np.maximum(forward, backward + gradients))
            held = held + holds
            self.seconds += np.array([each.seconds for each in options])[taken]
            self.errors += np.array([each.squared_error for each in options])[taken]
        self.peaks = np.maximum(peaks, held + math.ceil(chain.top))

    def within(self, most_squared_error: float) -> np.ndarray:
        return self.errors <= most_squared_error + 1e-12

    def fastest(self, limit: float, most_squared_error: float) -> tuple[float, float] | None:
        """Return the least seconds of the plans within the limits, and the smallest peak of those that take them."""
        found = np.flatnonzero((self.peaks <= limit) & self.within(most_squared_error))
        if not len(found):
            return None
        seconds = self.seconds[found]
        return seconds.min(), self.peaks[found[seconds <= seconds.min() + 1e-9]].min()


def limits_of(everything: Everything) -> list[float]:
    """Return limits from one byte less than any plan needs to one that all plans are within."""
    shares = np.quantile(everything.peaks, [0, 0.02, 0.2], method="lower")
    return [float(shares[0] - 1), *map(float, shares), math.inf]


@pytest.mark.sampled(fast=20, slow=50)
@pytest.mark.parametrize("seed", range(INSTANCES))
def test_the_answer_is_that_of_all_plans(seed: int) -> None:
    chain = a_chain(seed)
    everything = Everything(chain)

    for limit in limits_of(everything):
        for most in (math.inf, 12.5, 0):
            plan = solve(chain, limit, most)
            expected = everything.fastest(limit, most)

            if expected is None:
                assert plan is None
                continue
            assert plan is not None
            assert (chain.time(plan), chain.peak(plan)) == pytest.approx(expected, abs=1e-9)
            assert chain.peak(plan) <= limit
            assert chain.squared_error(plan) <= most


@pytest.mark.sampled(fast=20, slow=15)
@pytest.mark.parametrize("seed", range(INSTANCES // 4))
def test_the_least_peak_is_that_of_all_plans(seed: int) -> None:
    chain = a_chain(seed)
    everything = Everything(chain)

    for most in (math.inf, 12.5, 0):
        possible = everything.peaks[everything.within(most)]
        if not len(possible):
            with pytest.raises(ValueError, match="squared error"):
                least_peak(chain, most)
            continue
        plan = least_peak(chain, most)

        assert chain.peak(plan) == possible.min()
        seconds, _ = everything.fastest(possible.min(), most) or (0, 0)
        assert chain.time(plan) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_plan_needs_is_what_the_definitions_say(seed: int) -> None:
    chain = a_chain(seed, blocks=4)
    everything = Everything(chain)

    peaks = [chain.peak([int(each) for each in plan]) for plan in everything.plans]

    assert peaks == everything.peaks.tolist()


MIB = 2**20
LAYER = tuple(
    Option((590 - saved) * MIB, 690 * MIB, max(590, 790 - saved) * MIB, milliseconds / 1000, error)
    for saved, milliseconds, error in (
        (0, 0, 0),
        (561, 14.65, 0),
        (527, 3.08, 0.0001),
        (381, 2.08, 0.00015),
        (81, 0.03, 0),
    )
)
"""Five actions on a layer of an 8B Llama."""


def equal_blocks(blocks: int) -> Chain:
    return Chain((LAYER,) * blocks, (), 16_000 * MIB, 600 * MIB, [0] * blocks, 0, 0, 1.0)


@pytest.mark.sampled(fast=4, slow=3)
@pytest.mark.parametrize("limit", [18_500, 22_000, 27_500, 33_000, 38_000])
@pytest.mark.parametrize("most_squared_error", [math.inf, 0.0015])
def test_of_equal_blocks_the_answer_is_that_of_all_counts(limit: int, most_squared_error: float) -> None:
    """With no gradients, the last block's action and the counts of all others' tell what a plan needs."""
    blocks, best = 40, math.inf
    chain = equal_blocks(blocks)
    counts = np.array([(*each, blocks - 1 - sum(each)) for each in _counts(blocks - 1, len(LAYER) - 1)])
    figures = np.array([(each.held, each.seconds, each.squared_error) for each in LAYER])
    room = limit * MIB - chain.base
    for last in LAYER:
        held, seconds, errors = (counts @ figures).T
        fits = held + max(last.forward, last.backward, last.held + chain.top) <= room
        fits &= errors + last.squared_error <= most_squared_error + 1e-12
        best = min(best, seconds[fits].min(initial=math.inf) + last.seconds)

    plan = solve(chain, limit * MIB, most_squared_error)

    assert (chain.time(plan) if plan else math.inf) == pytest.approx(best + chain.seconds, abs=1e-9)


def _counts(total: int, parts: int) -> list[tuple[int, ...]]:
    """Return the tuples of counts that sum up to at most a total."""
    if not parts:
        return [()]
    return [(first, *rest) for first in range(total + 1) for rest in _counts(total - first, parts - 1)]


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from([math.inf, 20.0, 5.0]))
@settings(max_examples=30, deadline=None)
def test_a_larger_limit_is_never_slower(seed: int, blocks: int, most: float) -> None:
    chain = a_chain(seed, blocks)
    least = chain.peak(least_peak(chain)) - 1
    times = []
    for limit in np.linspace(least, least + 200, 15):
        plan = solve(chain, limit, most)
        assert plan is None or (chain.peak(plan) <= limit and chain.squared_error(plan) <= most)
        times.append(math.inf if plan is None else chain.time(plan))

    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(times))
    assert times[0] == math.inf


def test_labels_that_are_left_out_cost_time_but_no_limit_is_passed_nor_a_plan_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"_BEAMS": (1,), "MOST_LABELS": 2, "MOST_LABELS_BY_ERROR": 2}.items():
        monkeypatch.setattr(solver, name, value)
    slower = 0
    for seed in range(20):
        chain = a_chain(seed)
        everything = Everything(chain)
        for limit in limits_of(everything):
            for most in (math.inf, 12.5):
                plan = solve(chain, limit, most)
                expected = everything.fastest(limit, most)

                assert (plan is None) == (expected is None)
                if plan is not None and expected is not None:
                    assert chain.peak(plan) <= limit
                    assert chain.squared_error(plan) <= most
                    slower += chain.time(plan) > expected[0] + 1e-9

    assert slower


def test_a_chain_of_no_blocks_has_one_plan() -> None:
    chain = Chain((), (), base=10, top=5, gradients=(), gradients_of_top=1, least=12, seconds=0.5)

    assert solve(chain, 15) == ()
    assert solve(chain, 14) is None
    assert least_peak(chain) == ()
    assert (chain.peak(()), chain.time(()), chain.squared_error(())) == (15, 0.5, 0)


def test_one_option_per_block_is_the_plan_if_it_fits() -> None:
    block = [Option(held=4, forward=6, backward=7, seconds=1, squared_error=0.25)]
    chain = Chain([block] * 3, [{(0, 0): -1}] * 2, 10, 0, [2, 2, 2], 1, 0, 0)

    # the third block's backward pass: 10 + 4 + 3 held, 7 - 1 of its own, 1 of gradients
    assert chain.peak((0, 0, 0)) == 24
    assert solve(chain, 24) == least_peak(chain) == (0, 0, 0)
    assert solve(chain, 23) is None
    assert solve(chain, 24, 0.75) == (0, 0, 0)
    assert solve(chain, 24, 0.74) is None


def test_a_floor_over_the_limit_leaves_no_plan() -> None:
    chain = Chain([[Option(1, 1, 1, 1)]], (), 0, 0, [0], 0, least=100, seconds=0)

    assert solve(chain, 99) is None
    assert solve(chain, 100) == (0,)
    assert chain.peak(least_peak(chain)) == 100


def test_a_block_without_options_leaves_no_plan() -> None:
    assert solve(Chain([[]], (), 0, 0, [0], 0, 0, 0), math.inf) is None


def test_the_limit_that_a_plan_needs_lets_it_pass_whatever_the_fractions() -> None:
    blocks = [[Option(0.1, 0.7, 1.3, 0.1, 0.1), Option(0.3, 0.2, 0.6, 0.05, 0.3)]] * 7
    chain = Chain(blocks, [{(1, 1): 0.1}] * 6, 0.5, 0.2, [0.1] * 7, 0.3, 0, 0.1)

    for plan in itertools.product(range(2), repeat=7):
        found = solve(chain, chain.peak(plan), chain.squared_error(plan))

        assert found is not None
        assert chain.time(found) <= chain.time(plan) + 1e-9
