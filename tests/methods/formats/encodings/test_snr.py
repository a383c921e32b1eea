import math

import pytest
import torch

from actbench.methods.formats.encodings import DISTRIBUTIONS, Quality, build, snr_db, snr_table
from actbench.methods.formats.encodings.snr import quality

COUNT = 2**18


def test_decibels_by_hand():
    x = torch.tensor([3.0, -4.0])

    assert snr_db(x, torch.tensor([3.0, -4.5])) == pytest.approx(10 * math.log10(25 / 0.25))
    assert snr_db(x, x) == math.inf
    assert snr_db(x, torch.zeros(2)) == 0
    assert math.isnan(snr_db(x, torch.tensor([math.nan, 1])))
    assert math.isnan(snr_db(x, torch.tensor([math.inf, 1])))
    assert math.isnan(snr_db(torch.zeros(2), torch.zeros(2)))


def test_rows_are_in_order_and_see_the_same_numbers():
    encodings = [build("bf16"), build("smaq_simulated"), build("bf16")]
    names = ("relu", "normal")
    rows = snr_table(encodings, {name: DISTRIBUTIONS[name] for name in names}, 3, 1000)

    assert [(row.encoding, row.distribution) for row in rows] == [
        (encoding.spec, name) for encoding in encodings for name in names
    ]
    assert rows[:2] == rows[4:]
    assert rows != snr_table(encodings, {name: DISTRIBUTIONS[name] for name in names}, 4, 1000)
    assert (
        [row.counted_bits is None for row in rows]
        == [row.stored for row in rows]
        == [True] * 2 + [False] * 2 + [True] * 2
    )


def test_bits_are_those_of_the_parts():
    x = torch.randn(1000)
    row = quality(build("int:6"), "mine", x, torch.tensor(0))

    assert row.bits == 8 * (750 + 4 * 16) / 1000
    assert Quality.model_validate_json(row.model_dump_json()) == row


def test_infinite_decibels_survive_json():
    row = quality(build("bf16"), "halves", torch.tensor([0.5, 1.0]), torch.tensor(0))

    assert row.snr_db == math.inf
    assert Quality.model_validate_json(row.model_dump_json()) == row


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        ("normal", 0, 1),
        ("tiny", 0, 1e-6),
        ("laplace", 0, 2**0.5),
        ("relu", (2 * math.pi) ** -0.5, (0.5 - 0.5 / math.pi) ** 0.5),
        ("product", 0, 1),
    ],
)
def test_distributions_have_their_moments(name, mean, deviation):
    x = DISTRIBUTIONS[name](torch.Generator().manual_seed(1), COUNT)

    assert (x.shape, x.dtype) == ((COUNT,), torch.float32)
    assert abs(x.double().mean().item() - mean) < 4 * deviation / COUNT**0.5
    assert x.double().std().item() == pytest.approx(deviation, rel=0.01)


@pytest.mark.parametrize(
    ("name", "quartile"),
    [("student3", 0.764892), ("lognormal", 1e-8 * math.exp(2 * 0.674490)), ("laplace", math.log(2))],
)
def test_distributions_have_their_quartiles(name, quartile):
    x = DISTRIBUTIONS[name](torch.Generator().manual_seed(1), COUNT)

    assert x.kthvalue(COUNT * 3 // 4).values.item() == pytest.approx(quartile, rel=0.02)
