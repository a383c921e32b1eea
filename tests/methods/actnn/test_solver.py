from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.methods.actnn.solver import UNSPENT, WIDTHS, all_spent, error_of, least_variance, row_widths

GACT = (1, 2, 4, 8)
WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.item.default}


class NoWait(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in WAITS, function
        return function(*args, **(kwargs or {}))


def left(costs, bits):
    return sum(cost * error_of(width) for cost, width in zip(costs, bits, strict=True))


def by_trying_all(costs, weights, budget, choices):
    tried = itertools.product(choices, repeat=len(costs))
    return min(left(costs, bits) for bits in tried if np.dot(weights, bits) <= budget)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("average", [1, 1.25, 2, 3.5, 8])
def test_equal_weights_give_the_optimum(seed, average):
    costs = np.random.default_rng(seed).lognormal(0, 3, 4)
    found = least_variance(costs, np.full(4, 7), average * 4 * 7)

    assert left(costs, found) == pytest.approx(by_trying_all(costs, [7] * 4, average * 4 * 7, WIDTHS), rel=1e-12)


@pytest.mark.parametrize("choices", [GACT, (*GACT, 32), WIDTHS])
@pytest.mark.parametrize("seed", range(5))
def test_any_weights_are_within_one_step_of_the_optimum(seed, choices):
    """Greedy by gain per bit loses less than the gain of the first step that did not fit."""
    random = np.random.default_rng(seed)
    costs, weights = random.lognormal(0, 3, 4), random.integers(1, 10_000, 4)
    budget = 3.3 * weights.sum()
    found = least_variance(costs, weights, budget, choices)
    next_gains = [
        cost * (error_of(width) - error_of(choices[choices.index(width) + 1]))
        for cost, width in zip(costs, found, strict=True)
        if width != choices[-1]
    ]

    assert np.dot(weights, found) <= budget
    best = by_trying_all(costs, weights, budget, choices)
    assert best <= left(costs, found) * (1 + 1e-12)
    assert left(costs, found) - best <= max(next_gains)


@pytest.mark.parametrize("choices", [GACT, WIDTHS])
@pytest.mark.parametrize("seed", range(5))
def test_few_large_items_are_within_a_hundredth_of_the_optimum(seed, choices):
    """But for weights that are rounded up to a 4096th of the budget."""
    random = np.random.default_rng(seed)
    costs, weights = random.lognormal(0, 2, 5), random.integers(1, 10, 5)
    budget = 2.2 * weights.sum()
    found = least_variance(costs, weights, budget, choices)

    assert np.dot(weights, found) <= budget
    assert left(costs, found) <= 1.01 * by_trying_all(costs, weights, budget * (1 - 5 / 4096), choices)


@pytest.mark.parametrize("average", [2, 3, 4.5])
def test_a_few_large_items_are_never_worse_off_than_with_even_widths(average):
    """By gain per bit alone the smallest items would have 8 bits each, and one of the largest would lose one."""
    costs, weights = [0.18, 0.35, 0.38, 0.51, 0.67, 0.36, 0.13], [131, 131, 131, 65, 65, 33, 4]
    found = least_variance(costs, weights, average * sum(weights))

    assert left(costs, found) <= left(costs, [int(average)] * 7)


def test_what_does_not_fit_is_left_out_and_later_items_are_still_served():
    found = least_variance([1e6, 1, 1], [1000, 1, 1], 1002 + 14)

    assert found == [1, 8, 8]


def test_costs_that_differ_by_the_square_of_the_steps_get_one_bit_more_each():
    """1/9 of an item of cost 1 at 2 bits is what is left, and 1/49 of another at 3, so the second is worth 49/9."""
    assert least_variance([1, 49 / 9, 225 / 9, 961 / 9], [1] * 4, 2 + 3 + 4 + 5) == [2, 3, 4, 5]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_cost_that_is_no_number_counts_as_the_largest(bad):
    assert least_variance([1, bad, 100], [1, 1, 1], 9) == least_variance([1, 100, 100], [1, 1, 1], 9)


@pytest.mark.parametrize("costs", [[0, 0, 0], [np.nan] * 3, [1e-300] * 3, [1e300] * 3])
def test_equal_costs_are_served_evenly_and_the_first_first(costs):
    assert least_variance(costs, [5, 5, 5], 5 * 7) == [3, 2, 2]


def test_an_item_of_no_cost_is_served_last():
    assert least_variance([0, 1], [1, 1], 2 + 7) == [1, 8]
    assert least_variance([0, 1], [1, 1], 2 + 8) == [2, 8]


def test_a_budget_below_the_least_gives_the_least_and_one_above_the_most_gives_the_most():
    assert least_variance([3, 1], [1, 2], 1) == [1, 1]
    assert least_variance([3, 1], [1, 2], 1e9, (1, 2, 4)) == [4, 4]
    assert least_variance([], [], 10) == []


@pytest.mark.parametrize("average", [1.1, 2.3, 4.7])
def test_an_average_in_floating_point_is_not_missed_by_rounding(average):
    weights = np.full(10, 3 * 10**9)

    assert sum(least_variance(np.ones(10), weights, average * weights.sum())) == round(average * 10)


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize("average", [1, 1.5, 2, 5.3, 8])
def test_rows_get_the_widths_that_equal_weights_get_on_the_host(rows, average):
    costs = torch.from_numpy(np.random.default_rng(rows).lognormal(0, 3, rows))
    total = round(average * rows)

    assert row_widths(costs, total).tolist() == least_variance(costs.numpy(), np.ones(rows), total)


@pytest.mark.parametrize(
    "costs",
    [
        torch.zeros(9),
        torch.full((9,), torch.nan),
        torch.tensor([torch.inf, torch.nan, 0, -torch.inf, 1, 1, 1e-45, 3e38, 1e-45]),
        torch.tensor([1e-45, 0, 0]),
        torch.full((64,), 3e38),
        torch.tensor([65504, 6e-8, 0], dtype=torch.float16),
    ],
)
def test_the_sum_is_exact_whatever_the_costs(costs):
    rows = costs.numel()
    for total in range(rows, 8 * rows + 1, 1 + rows // 16):
        widths = row_widths(costs, total)

        assert widths.dtype == torch.int32
        assert int(widths.sum()) == total
        assert 1 <= int(widths.min()) <= int(widths.max()) <= 8
        assert widths.tolist() == least_variance(costs.double().numpy(), np.ones(rows), total)


def test_rows_of_equal_cost_differ_by_a_bit_at_most():
    assert row_widths(torch.zeros(5), 13).tolist() == [3, 3, 3, 2, 2]
    assert row_widths(torch.ones(5), 13).tolist() == [3, 3, 3, 2, 2]


def test_a_smaller_largest_width():
    assert row_widths(torch.tensor([1.0, 1e9]), 5, most=4).tolist() == [1, 4]
    assert row_widths(torch.ones(3), 3, most=1).tolist() == [1, 1, 1]
    assert row_widths(torch.ones(0), 0).tolist() == []


@pytest.mark.parametrize("total", [3, 33])
def test_a_sum_that_no_widths_have_is_refused(total):
    with pytest.raises(ValueError, match=rf"total_bits of 4 rows must be from 4 to 32, found {total}"):
        row_widths(torch.ones(4), total)


def test_nothing_waits_for_the_device():
    with NoWait():
        widths = row_widths(torch.rand(50), 100)

    assert int(widths.sum()) == 100


def test_fake_costs_give_fake_widths():
    with FakeTensorMode():
        widths = row_widths(torch.rand(50), 100)

    assert (widths.shape, widths.dtype) == ((50,), torch.int32)


@pytest.mark.parametrize("choices", [WIDTHS, (1, 2, 4, 8)])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("average", [1.4, 2.5, 3.4, 6.9])
def test_all_of_the_budget_is_spent_in_parts_of_steps(average, count, choices):
    draw = np.random.default_rng(count)
    costs, weights = draw.exponential(1, count), draw.integers(1, 1000, count)
    budget = average * weights.sum()

    bits = all_spent(costs, weights, budget, choices)

    assert (bits * weights).sum() == pytest.approx(budget, rel=UNSPENT)
    assert (bits * weights).sum() <= budget * (1 + 1e-9)
    assert all(choices[0] <= width <= choices[-1] for width in bits)
    assert sum(width not in choices for width in bits) <= 1
