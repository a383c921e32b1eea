import numpy as np
import pytest

from actbench.methods.fewbit.optimallevels import best_segments


def uniform(x):
    return np.ones_like(x)


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def elu(x):
    return np.where(x > 0, 1.0, np.exp(np.minimum(x, 0)))


def selu(x):
    return 1.0507009873554805 * np.where(x > 0, 1.0, 1.6732632423543772 * np.exp(np.minimum(x, 0)))


def hardswish(x):
    return np.where(x < -3, 0.0, np.where(x > 3, 1.0, (2 * x + 3) / 6))


NO_KINKS = np.array([])
ALL, HALF = (-100.0, 100.0), (0.0, 100.0)


@pytest.mark.parametrize(
    ("derivative", "domain", "kinks", "errors"),
    [
        (sigmoid, ALL, [], ["0.3767", "0.0610", "0.01296", "0.00301"]),  # softplus
        (elu, ALL, [0], ["0.1903", "0.0269", "0.00537", "0.00121"]),
        (selu, ALL, [0], ["0.2857", "0.1048", "0.0191", "0.0040"]),
        (hardswish, ALL, [-3, 3], ["0.5000", "0.2594", "0.0556", "0.0102"]),
        (lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x))), ALL, [], ["0.2150", "0.0594", "0.0177", "0.00471"]),  # silu
        (lambda x: 1 - np.tanh(x) ** 2, HALF, [], ["0.1673", "0.0328", "0.0074", "0.0018"]),
        (lambda x: sigmoid(x) * (1 - sigmoid(x)), HALF, [], ["0.0208", "0.0041", "0.00092", "0.00022"]),
        (lambda x: 1 / (1 + abs(x)) ** 2, HALF, [], ["0.1618", "0.0404", "0.0101", "0.0025"]),  # softsign
    ],
)
def test_errors_are_the_global_optima(derivative, domain, kinks, errors):
    halves = 1 if domain == ALL else 2  # the figures are over both half lines
    for bits, error in enumerate(errors, 1):
        found = best_segments(derivative, uniform, domain, 2**bits, np.array(kinks, float))
        digits = len(error) - 2
        assert f"{halves * found.error:.{digits}f}" == error


def test_a_step_function_is_met_exactly():
    found = best_segments(lambda x: np.where(x > 0.5, 2.0, 1.0), uniform, (-1.0, 1.0), 2, np.array([0.5]))
    assert found.borders.tolist() == [0.5]
    assert found.levels == pytest.approx([1, 2], abs=1e-12)
    assert found.error == pytest.approx(0, abs=1e-12)


def test_a_straight_line_is_cut_evenly():
    found = best_segments(lambda x: x, uniform, (0.0, 1.0), 4, NO_KINKS)
    assert found.borders == pytest.approx([0.25, 0.5, 0.75])
    assert found.levels == pytest.approx([0.125, 0.375, 0.625, 0.875])
    assert found.error == pytest.approx(1 / 12 / 16)


def test_where_the_weight_is_zero_nothing_is_spent():
    found = best_segments(lambda x: x, lambda x: np.where(x > 0, 1.0, 1e-300), (-1.0, 1.0), 2, np.array([0.0]))
    assert found.borders == pytest.approx([0.5])
