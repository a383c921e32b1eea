import pytest
import torch

import actbench
from actbench.methods.fewbit.gated import GATES, inversion, mixture

PUBLISHED = {"gelu": (-0.04922, 3.186), "silu": (-0.04060, 6.305)}  # a and c of the authors, to few digits


def error(function, first, last, left, right):
    """The squared distance of three ReLUs; the middle one brings slope and offset at infinity to those of x."""
    x = torch.linspace(-60, 60, 600001, dtype=torch.float64)
    slopes = (first, 1 - first - last, last)
    places = (left, -(first * left + last * right) / slopes[1], right)
    approximation = sum(a * (x - c).clamp(min=0) for a, c in zip(slopes, places, strict=True))
    return float((x * GATES[function](x) - approximation).square().sum() * 2e-4)


@pytest.mark.parametrize(
    "function", [pytest.param(name, marks=() if name == "silu" else pytest.mark.slow) for name in GATES]
)
def test_three_relus_are_the_nearest(function):
    found = mixture(function)
    best = (found.levels[1], found.levels[1], found.borders[0], found.borders[2])

    assert found.levels == (0, best[0], 1 - best[0], 1)
    assert found.error == pytest.approx(error(function, *best), rel=1e-5)
    for step in (-0.01, 0.01):
        for moved in range(4):
            other = [value + step * (place == moved) for place, value in enumerate(best)]
            assert error(function, *other) > error(function, *best)


@pytest.mark.parametrize("function", PUBLISHED)
def test_three_relus_are_no_worse_than_the_published_ones(function):
    a, c = PUBLISHED[function]
    assert mixture(function).error < error(function, a, a, -c, c)


@pytest.mark.parametrize("solved", [mixture, inversion])
def test_a_simulated_card_leaves_no_trace_in_a_table(solved):
    """Tables are kept for the whole process, whoever asks for one first."""
    found = solved("silu")
    solved.cache_clear()
    with actbench.simulate("cpu"), torch.device("meta"):
        assert solved("silu") == found


@pytest.mark.parametrize("function", GATES)
def test_the_inversion_turns_where_the_function_does(function):
    found = inversion(function)
    x = torch.linspace(-5, 2, 700001, dtype=torch.float64)
    y = x * GATES[function](x)
    assert found.turn == pytest.approx(float(x[y.argmin()]), abs=2e-5)
    assert found.least == pytest.approx(float(y.min()), abs=1e-9)
    assert (found.left[0], found.left[-1], found.right[0]) == (0, 0, 0)
    assert found.right[-1] == pytest.approx(1, abs=1e-6)
