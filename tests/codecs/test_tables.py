import itertools
import math

import numpy as np
import platformdirs
import pytest

from actbench.codecs import tables
from actbench.codecs.activation import ACTIVATIONS, Activation
from actbench.codecs.segments import best_segments

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


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_the_conditions_of_an_optimum_hold_and_more_bits_are_better(function):
    derivative = ACTIVATIONS[function].derivative
    errors = []
    for bits in range(1, 8):
        found = tables.solve(function, bits)
        borders, levels = np.array(found.borders), np.array(found.levels)
        assert np.abs(derivative(borders) - (levels[1:] + levels[:-1]) / 2).max() < 1e-11
        errors.append(found.error)
    assert all(more < fewer / 3 for fewer, more in itertools.pairwise(errors))


@pytest.mark.parametrize("weight", ["uniform", "normal"])
def test_eight_bits(weight):
    assert tables.solve("gelu", 8, weight).error < tables.solve("gelu", 6, weight).error / 10


@pytest.mark.parametrize("scale", [1e-3, 0.1, 5.0, 1e3])
def test_any_scale_of_the_inputs(scale):
    found = tables.solve("gelu", 3, "normal", scale)
    inner = np.array(found.levels[1:-1])
    assert len(set(inner)) == 6
    assert np.abs(found.borders).max() < 5 * scale


def test_an_even_derivative_has_all_its_levels_on_one_half_line(monkeypatch):
    tanh = Activation("tanh", "Tanh", lambda x: 1 - np.tanh(x) ** 2, even=True)
    monkeypatch.setitem(ACTIVATIONS, "tanh", tanh)
    found = tables.solve("tanh", 3)
    assert found.fold
    assert found.borders[0] > 0
    assert found.error == pytest.approx(0.0074, abs=0.5e-4)


def test_levels_are_means_of_the_derivative():
    found = tables.solve("gelu", 3)
    ends = [-100.0, *found.borders, 100.0]
    for left, right, level in zip(ends, ends[1:], found.levels, strict=False):
        area = [0.5 * x * math.erfc(-x / math.sqrt(2)) for x in (left, right)]
        assert level == pytest.approx((area[1] - area[0]) / (right - left), abs=1e-12)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    tables.table.cache_clear()
    yield tmp_path
    tables.table.cache_clear()


def test_a_table_is_kept_on_disk_and_read_back_equal(home, monkeypatch):
    first = tables.table("gelu", 3)
    tables.table.cache_clear()
    monkeypatch.setattr(tables, "solve", None)
    assert tables.table("gelu", 3) == first


@pytest.mark.parametrize("content", [b"", b"{", b"\x00\xff", b'{"function": "gelu", "bits": 2}'])
def test_a_broken_file_is_written_again(home, content):
    first = tables.table("gelu", 2)
    (file,) = home.rglob("*.json")
    whole = file.read_bytes()
    file.write_bytes(content)
    tables.table.cache_clear()

    assert tables.table("gelu", 2) == first
    assert file.read_bytes() == whole
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_table_with_borders_out_of_order_is_broken(home):
    first = tables.table("gelu", 2)
    (file,) = home.rglob("*.json")
    broken = first.model_dump()
    broken["borders"] = broken["borders"][::-1]
    file.write_text(str(broken).replace("'", '"').replace("False", "false").replace("(", "[").replace(")", "]"))
    tables.table.cache_clear()
    assert tables.table("gelu", 2) == first


def test_no_folder_means_no_cache(home, monkeypatch):
    (home / "actbench").write_text("a file where a folder should be")
    assert tables.table("gelu", 2) == tables.solve("gelu", 2)
