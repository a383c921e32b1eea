import itertools
import math

import numpy as np
import pytest

from actbench.errors import UsageError
from actbench.methods.fewbit import tables
from actbench.methods.fewbit.activation import ACTIVATIONS, activation
from actbench.methods.fewbit.optimallevels import best_segments

HALF_LINE = {  # borders from zero up, levels above one half, error: the other half is the mirror image
    -10: {
        1: ([0], [1.000000], 0.141047),
        2: ([0, 0.46903], [0.680475, 1.015724], 0.040563),
        3: ([0, 0.32632, 0.71109, 2.39808], [0.627907, 0.874770, 1.088823, 1.002600], 0.011898),
        4: (
            [0, 0.15503, 0.31526, 0.48750, 0.68346, 0.93188, 2.05308, 2.68510],
            [0.561601, 0.683820, 0.802967, 0.916523, 1.020902, 1.109350, 1.049672, 1.001331],
            0.003140,
        ),
    },
    -100: {
        1: ([0], [1.000000], 0.141047),
        2: ([0, 0.45360], [0.674942, 1.001481], 0.044753),
        3: ([0, 0.32595, 0.71013, 2.41552], [0.627769, 0.874384, 1.088314, 1.000194], 0.011989),
        4: (
            [0, 0.15497, 0.31513, 0.48728, 0.68311, 0.93127, 2.05877, 2.70563],
            [0.561576, 0.683744, 0.802845, 0.916362, 1.020717, 1.109173, 1.048627, 1.000095],
            0.003162,
        ),
    },
}
NORMAL = {
    1: ([0], [0.90915], 0.2904),
    2: ([0, 0.4990], [0.68732, 1.04639], 0.1325),
    3: ([0, 0.2240, 0.4692, 0.7793], [0.58826, 0.76331, 0.93317, 1.09002], 0.0647),
}


def mirrored(borders, levels):
    return [-b for b in borders[:0:-1]] + borders, [1 - s for s in levels[::-1]] + levels


def gelu(bits, end=100.0):
    return best_segments(ACTIVATIONS["gelu"].derivative, np.ones_like, (-end, end), 2**bits, np.array([]))


@pytest.mark.parametrize("end", [10, 100])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_gelu_is_the_known_optimum(end, bits):
    half_borders, half_levels, error = HALF_LINE[-end][bits]
    borders, levels = mirrored(half_borders, half_levels)
    found = gelu(bits, end)

    assert found.borders == pytest.approx(borders, abs=1e-4)
    assert found.levels == pytest.approx(levels, abs=1e-4)
    assert found.error == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_normal_gelu_is_the_known_optimum(bits):
    half_borders, half_levels, relative_error = NORMAL[bits]
    borders, levels = mirrored(half_borders, half_levels)
    found = tables.solve("gelu", bits, "normal")
    x, weights = np.polynomial.hermite_e.hermegauss(100)
    square = (weights * ACTIVATIONS["gelu"].derivative(x) ** 2).sum() / weights.sum()

    assert found.borders == pytest.approx(borders, abs=1e-4)
    assert found.levels == pytest.approx(levels, abs=1e-4)
    assert math.sqrt(found.error / square) == pytest.approx(relative_error, abs=1e-4)


@pytest.mark.parametrize("most", [5, pytest.param(7, marks=pytest.mark.sampled(slow=5))])
@pytest.mark.parametrize("function", ACTIVATIONS)
def test_the_conditions_of_an_optimum_hold_and_more_bits_are_better(function, most):
    derivative = ACTIVATIONS[function].derivative
    errors = []
    for bits in range(1, most + 1):
        found = tables.solve(function, bits)
        borders, levels = np.array(found.borders), np.array(found.levels)
        means = (levels[1:] + levels[:-1]) / 2
        smooth = ~np.isin(borders, ACTIVATIONS[function].kinks)
        assert np.abs(derivative(borders) - means)[smooth].max(initial=0) < 1e-11
        beside = np.sort([derivative(borders - 1e-9), derivative(borders + 1e-9)], axis=0)
        assert ((beside[0] - 1e-6 < means) & (means < beside[1] + 1e-6)).all()
        errors.append(found.error)
    assert all(more < fewer / 1.9 for fewer, more in itertools.pairwise(errors))


@pytest.mark.parametrize("weight", ["uniform", pytest.param("normal", marks=pytest.mark.slow)])
def test_eight_bits(weight):
    assert tables.solve("gelu", 8, weight).error < tables.solve("gelu", 6, weight).error / 10


@pytest.mark.parametrize("scale", [1e-3, 0.1, 5.0, 1e3])
def test_any_scale_of_the_inputs(scale):
    found = tables.solve("gelu", 3, "normal", scale)
    inner = np.array(found.levels[1:-1])
    assert len(set(inner)) == 6
    assert np.abs(found.borders).max() < 5 * scale


OPTIMA = {  # for 1 to 4 bits over [-100, 100], on |x| where the derivative is even: the published rounding
    "celu": (0.1903, 0.0269, 0.00537, 0.00121),
    "elu": (0.1903, 0.0269, 0.00537, 0.00121),
    "gelu": (0.1410, 0.0448, 0.01199, 0.00316),
    "hardswish": (0.5, 0.2594, 0.0556, 0.0102),
    "logsigmoid": (0.3767, 0.0610, 0.01296, 0.00301),
    "mish": (0.1700, 0.0490, 0.01411, 0.00377),
    "selu": (0.2857, 0.1048, 0.0191, 0.0040),
    "sigmoid": (0.0208, 0.0041, 0.00092, 0.00022),
    "silu": (0.2150, 0.0594, 0.0177, 0.00471),
    "softplus": (0.3767, 0.0610, 0.01296, 0.00301),
    "softsign": (0.1618, 0.0404, 0.0101, 0.0025),
    "tanh": (0.1673, 0.0328, 0.0074, 0.0018),
    "tanhshrink": (0.1673, 0.0328, 0.0074, 0.0018),
}
SHIPPED = {  # with FewBit, on the same domain
    "celu": (0.1903, 0.0269, 0.00718, 0.00160),
    "elu": (0.1903, 0.0269, 0.00718, 0.00160),
    "gelu": (0.1410, 0.0448, 0.01199, 0.00411),
    "hardswish": (0.5, 0.2755, 0.0556, 0.2618),
    "logsigmoid": (0.3767, 0.0610, 0.01296, 0.00301),
    "mish": (0.1700, 0.0490, 0.01411, 0.00386),
    "selu": (0.2857, 0.3808, 0.0996, 0.0364),
    "sigmoid": (0.1573, 0.0149, 0.00331, 0.00110),
    "silu": (0.2150, 0.0594, 0.0279, 0.00538),
    "softplus": (0.3767, 0.0610, 0.01296, 0.00301),
    "softsign": (0.6339, 0.1216, 0.0333, 0.0119),
    "tanh": (1.295, 0.1196, 0.0265, 0.0088),
    "tanhshrink": (1.295, 0.1196, 0.0265, 0.0088),
}


@pytest.mark.parametrize("function", OPTIMA)
def test_errors_are_the_known_optima_and_never_above_those_shipped_with_fewbit(function):
    for bits, (optimum, shipped) in enumerate(zip(OPTIMA[function], SHIPPED[function], strict=True), start=1):
        error = tables.solve(function, bits).error
        assert error == pytest.approx(optimum, abs=5e-5)
        assert error <= shipped + 5e-5


def test_an_even_derivative_has_all_its_levels_on_one_half_line_unless_the_domain_is_lopsided():
    assert tables.solve("tanh", 3).fold
    assert tables.solve("tanh", 3).borders[0] > 0
    assert not tables.solve("tanh", 3, domain=(-5, 10)).fold


def test_relative_gradient_error_is_the_known_one():
    expected = {"gelu": 0.0862, "silu": 0.1025, "sigmoid": 0.0477, "tanh": 0.0594, "softsign": 0.0964, "selu": 0.0613}
    found = {name: tables.relative_gradient_error(name, tables.solve(name, 3)) for name in expected}
    assert found == pytest.approx(expected, abs=2e-4)


def test_a_domain_of_ones_own():
    assert tables.solve("gelu", 3, domain=(-10.0, 10.0)).error == pytest.approx(0.011898, abs=1e-6)
    with pytest.raises(UsageError, match="lower end first"):
        tables.solve("gelu", 3, domain=(1.0, -1.0))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("elu", {"alpha": 0.5}),
        ("elu", {"alpha": -1.0}),
        ("elu", {"alpha": 0.0}),
        ("celu", {"alpha": 0.1}),
        ("celu", {"alpha": 50.0}),
        ("softplus", {"beta": 5.0}),
        ("softplus", {"beta": 2.0, "threshold": 0.5}),
    ],
)
@pytest.mark.parametrize("weight", ["uniform", "normal"])
def test_parameters_have_tables_of_their_own(name, parameters, weight):
    own = activation(name, **parameters)
    errors = [tables.solve(own, bits, weight).error for bits in (1, 3, 5)]
    assert own.key.startswith(f"{name}(")
    assert tables.solve(own, 3, weight).levels != tables.solve(name, 3, weight).levels
    assert errors[2] <= errors[1] <= errors[0]


def test_tables_of_different_parameters_and_domains_are_different_files(home):
    tables.table(activation("elu", alpha=0.5), 2)
    tables.table(activation("elu", alpha=0.25), 2)
    tables.table("elu", 2)
    tables.table("elu", 2, domain=(-1.0, 1.0))
    assert len(list(home.rglob("*.json"))) == 4


def test_levels_are_means_of_the_derivative():
    found = tables.solve("gelu", 3)
    ends = [-100.0, *found.borders, 100.0]
    for left, right, level in zip(ends, ends[1:], found.levels, strict=False):
        area = [0.5 * x * math.erfc(-x / math.sqrt(2)) for x in (left, right)]
        assert level == pytest.approx((area[1] - area[0]) / (right - left), abs=1e-12)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tables._known.cache_clear()
    yield tmp_path
    tables._known.cache_clear()


def test_a_table_is_kept_on_disk_and_read_back_equal(home, monkeypatch):
    first = tables.table("gelu", 3)
    tables._known.cache_clear()
    monkeypatch.setattr(tables, "solve", None)
    assert tables.table("gelu", 3) == first


@pytest.mark.parametrize("content", [b"", b"{", b"\x00\xff", b'{"function": "gelu", "bits": 2}'])
def test_a_broken_file_is_written_again(home, content):
    first = tables.table("gelu", 2)
    (file,) = home.rglob("*.json")
    whole = file.read_bytes()
    file.write_bytes(content)
    tables._known.cache_clear()

    assert tables.table("gelu", 2) == first
    assert file.read_bytes() == whole
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_table_with_borders_out_of_order_is_broken(home):
    first = tables.table("gelu", 2)
    (file,) = home.rglob("*.json")
    broken = first.model_dump()
    broken["borders"] = broken["borders"][::-1]
    file.write_text(str(broken).replace("'", '"').replace("False", "false").replace("(", "[").replace(")", "]"))
    tables._known.cache_clear()
    assert tables.table("gelu", 2) == first


def test_no_folder_means_no_cache(home, monkeypatch):
    (home / "actbench").write_text("a file where a folder should be")
    assert tables.table("gelu", 2) == tables.solve("gelu", 2)
