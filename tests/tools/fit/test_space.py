"""Plans in text, costs that add, hulls, and the bound that no plan is below."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from actbench import scheme as schemes
from actbench.model.records import Case
from actbench.scheme.only import compiled
from actbench.tools.fit.costs import Blocks, Costs, Effect, Way
from actbench.tools.fit.errors import Errors
from actbench.tools.fit.plan import Candidate, Places, Plan, patterns_of
from actbench.tools.fit.records import ANY, EXACT
from actbench.tools.fit.solver import Chain, Option, lower_hull, solve
from actbench.tools.fit.space import Setting, Space
from actbench.tools.fit.survey import near_hull

candidate = Candidate.of


CHECKPOINT, GACT, FEWBIT = (frozenset({candidate(spec)}) for spec in ("checkpoint", "gact:L2", "fewbit:2"))
NOTHING: frozenset[Candidate] = frozenset()
EXACT_CASE = Case(model="tiny-llama", batch_size=2, meter="simulated")
LAYERS = Places(tuple(f"model.layers.{number}" for number in range(12)))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0], "l.0"),
        ([0, 1, 2], "l.[0-2]"),
        ([2, 0, 1, 9, 10, 11], "l.[0-2] l.[9-11]"),
        ([1, 3, 5], "l.1 l.3 l.5"),
        ([9, 10], "l.[9-10]"),
        ([99, 100], "l.[99-100]"),
    ],
)
def test_numbers_in_a_row_are_a_range(numbers: list[int], expected: str) -> None:
    assert " ".join(patterns_of(f"l.{number}" for number in numbers)) == expected


def test_paths_of_several_lists_and_without_numbers_stay_apart() -> None:
    paths = ["encoder.0.block", "encoder.1.block", "decoder.0.block", "lm_head"]

    assert set(patterns_of(paths)) == {"lm_head", "encoder.[0-1].block", "decoder.0.block"}


def test_the_last_number_of_a_path_makes_the_range() -> None:
    assert patterns_of(["layer1.0", "layer1.1", "layer2.0"]) == ("layer1.[0-1]", "layer2.0")


@given(st.sets(st.integers(0, 130), min_size=1))
def test_ranges_match_the_paths_that_they_are_of_and_no_others(numbers: set[int]) -> None:
    found = patterns_of(f"model.layers.{number}" for number in numbers)

    patterns = [compiled(pattern) for pattern in found]
    matched = {number for number in range(140) if any(each.fullmatch(f"model.layers.{number}") for each in patterns)}
    assert matched == numbers


def test_a_plan_is_written_with_ranges() -> None:
    plan = Plan(
        frozenset({candidate("release")}), (CHECKPOINT,) * 5 + (GACT | FEWBIT,) * 2 + (NOTHING,) * 4 + (FEWBIT,)
    )

    scheme = plan.case(EXACT_CASE, LAYERS).scheme

    assert set(scheme.split("+")) == {
        "release",
        "checkpoint,only=model.layers.[0-4]",
        "gact:L2,only=model.layers.[5-6]",
        "fewbit:2,only=model.layers.[5-6]/model.layers.11",
    }
    assert schemes.build(scheme).spec == scheme


def test_what_is_done_with_all_blocks_by_recomputation_needs_no_paths() -> None:
    assert Plan(actions=(CHECKPOINT,) * 12).case(EXACT_CASE, LAYERS).scheme == "checkpoint"
    assert Plan(actions=(FEWBIT,) * 12).case(EXACT_CASE, LAYERS).scheme == "fewbit:2,only=model.layers.[0-11]"
    assert Plan(actions=(FEWBIT,) * 12, rest=FEWBIT).case(EXACT_CASE, LAYERS).scheme == "fewbit:2"
    assert Plan().case(EXACT_CASE, LAYERS) == EXACT_CASE


def test_what_the_exact_step_has_stays_beside_a_plan() -> None:
    case = Plan(actions=(CHECKPOINT,) * 12).case(EXACT_CASE.model_copy(update={"scheme": "lora:4"}), LAYERS)

    assert set(case.scheme.split("+")) == {"lora:4", "checkpoint"}


def test_a_plan_trains_as_its_furthest_part() -> None:
    assert Plan(actions=(CHECKPOINT, NOTHING)).training().is_exact
    assert Plan(actions=(CHECKPOINT, GACT)).training().gradient == candidate("gact:L2").training().gradient
    assert Plan(frozenset({candidate("lora:4")})).training().trained == "adapters"
    assert not Plan(actions=(CHECKPOINT, NOTHING)).is_uniform
    assert Plan(actions=(CHECKPOINT, CHECKPOINT)).is_uniform


def costs(held: list[float], seconds: list[float], **around: float) -> Costs:
    none = np.zeros(len(held))
    given = {"base": 0.0, "stem": 0.0, "top": 0.0, "end": 0.0, "update": 0.0, "top_gradients": 0.0}
    given |= {"around_seconds": 0.0, **around}
    return Costs(**given, held=np.array(held), forward=none, backward=none, gradients=none, seconds=np.array(seconds))


def test_costs_add_and_differences_are_taken_back() -> None:
    one, two = costs([1, 2], [3, 4], base=5, top=6), costs([10, 20], [30, 40], base=50, around_seconds=60)

    assert (one + two - two).held.tolist() == one.held.tolist()
    assert (one + two).base == 55
    assert (one + two).total_seconds == one.total_seconds + two.total_seconds
    assert one.of_rest().peak == one.peak - one.held.sum()
    assert one.at([0, 1, 1, 1]).held.tolist() == [1, 2, 2, 2]


def test_micro_batches_hold_parts_and_take_the_same_time() -> None:
    whole = costs([8, 8], [1, 1], base=16, top=4, around_seconds=1)

    assert whole.in_parts(4).held.tolist() == [2, 2]
    assert whole.in_parts(4).total_seconds == whole.total_seconds
    assert whole.cut(2, 1.5).total_seconds == pytest.approx(1.5 * whole.total_seconds)


points = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12)


@given(points)
def test_no_point_is_below_the_hull_and_its_corners_are_points(given: list[tuple[int, int]]) -> None:
    corners = lower_hull(given)

    assert set(corners) <= set(given)
    assert [held for held, _ in corners] == sorted({held for held, _ in corners})
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(corners)]
    assert all(rate < 0 for rate in rates)
    assert rates == sorted(rates)
    for held, seconds in given:
        for (less, slow), (more, fast) in itertools.pairwise(corners):
            if less <= held <= more:
                assert seconds >= slow + (fast - slow) * (held - less) / (more - less) - 1e-9
    assert corners[0][0] == min(held for held, _ in given)
    assert corners[-1][1] == min(seconds for _, seconds in given)


@given(points, st.integers(1, 12))
def test_what_is_near_the_hull_has_all_of_its_corners(given: list[tuple[int, int]], most: int) -> None:
    named = dict(enumerate(given))

    near = near_hull(named, most)

    assert set(lower_hull(given)) <= {named[each] for each in near}
    assert len(near) >= min(most, len(named))
    assert len(set(near)) == len(near)


@given(st.lists(points, min_size=1, max_size=4), st.integers(0, 200))
def test_the_linear_bound_is_never_above_the_best_choice(blocks: list[list[tuple[int, int]]], limit: int) -> None:
    options = [[Option(held, 0, 0, seconds) for held, seconds in each] for each in blocks]
    bound = Chain(options, (), 0, 0, [0] * len(blocks), 0, 0, 0.0).bound(limit)

    best = math.inf
    for plan in itertools.product(*blocks):
        if sum(held for held, _ in plan) <= limit:
            best = min(best, sum(seconds for _, seconds in plan))
    assert bound <= best
    assert (bound == math.inf) == (best == math.inf)


def a_setting(seed: int) -> Setting:
    """Return a setting with a chain of random blocks: some equal, some with pair terms, which may be negative."""
    chance = random.Random(seed)
    kinds = [tuple(Option(*(chance.randint(0, 40) for _ in range(4))) for _ in range(3)) for _ in range(2)]
    options = [chance.choice(kinds) for _ in range(5)]
    keys = list(itertools.product(range(3), repeat=2))
    pairs = [{key: chance.randint(-15, 15) for key in chance.sample(keys, 3)} for _ in range(4)] if seed % 2 else []
    numbers = [chance.randint(0, 20) for _ in range(3)]
    chain = Chain(options, pairs, numbers[0], numbers[1], [0] * 5, 0, numbers[2], 1.0)
    return Setting(NOTHING, NOTHING, [NOTHING, CHECKPOINT, FEWBIT], chain)


@pytest.mark.sampled(fast=20, slow=20)
@pytest.mark.parametrize("seed", range(60))
def test_no_setting_is_solved_below_its_bound(seed: int) -> None:
    setting = a_setting(seed)

    for limit in (20, 40, 60, 90, 130, 200, math.inf):
        plan = solve(setting.chain, limit)
        if plan is not None:
            assert setting.chain.bound(limit) <= setting.chain.time(plan)
    assert setting.chain.bound(math.inf) <= setting.chain.bound(150)


def space_of(chance: random.Random, blocks: int = 4) -> Space:
    """Return a space of two settings around random blocks, with exact and other actions."""

    def effect(best: int) -> Effect:
        changed = costs(
            [-chance.randint(0, best) for _ in range(blocks)], [chance.randint(1, 9) for _ in range(blocks)]
        )
        keeps = tuple(chance.random() < 0.5 for _ in range(blocks))
        return Effect(changed, keeps, tuple(not each for each in keeps))

    held = [chance.randint(40, 60) for _ in range(blocks)]
    still = Effect(costs([0] * blocks, [0] * blocks), (True,) * blocks, (False,) * blocks)
    way = Way(
        NOTHING,
        1,
        costs(held, [10.0] * blocks, base=20, top=5, around_seconds=5),
        {frozenset({candidate("release")}): costs([0] * blocks, [0] * blocks, base=-8, around_seconds=2)},
        {NOTHING: still, CHECKPOINT: effect(35), FEWBIT: effect(20)},
    )
    paths = tuple(f"model.layers.{number}" for number in range(blocks))
    outputs = np.array([float(chance.randint(0, 6)) for _ in range(blocks)])
    return Space(Blocks(paths, ("one",) * blocks, outputs), [way])


@pytest.mark.sampled(fast=6, slow=14)
@pytest.mark.parametrize("seed", range(20))
def test_the_answer_is_the_fastest_of_all_plans_of_all_settings(seed: int) -> None:
    space = space_of(random.Random(seed))

    for limit, level, most in itertools.product((100, 140, 180, 220), (EXACT, ANY), (math.inf, 4.0)):
        space.know(Errors(of_blocks={FEWBIT: [1.0, 2.0, 3.0, 4.0]}), most)
        every = [
            setting.plan(indices)
            for setting in space.settings(level)
            for indices in itertools.product(range(len(setting.actions)), repeat=4)
        ]
        within = [each for each in every if each.peak <= limit and space.errors.of(each) <= most]
        found = space.solve(level, limit)

        assert (found is None) == (not within)
        if found is not None:
            assert found.seconds == pytest.approx(min(each.seconds for each in within))
            assert found.peak <= limit
        uniform = space.uniform(level, limit)
        if uniform is not None:
            assert found is not None
            assert uniform.is_uniform
            assert found.seconds <= uniform.seconds
        least = space.least(level)
        assert least is not None
        right = [each for each in every if space.errors.of(each) <= most]
        assert least.peak == min(each.peak for each in right)


def test_exact_plans_have_exact_actions_only() -> None:
    space = space_of(random.Random(1))

    assert all(FEWBIT not in setting.actions for setting in space.settings(EXACT))
    assert all(FEWBIT in setting.actions for setting in space.settings(ANY))
