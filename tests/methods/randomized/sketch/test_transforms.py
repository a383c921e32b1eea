import math

import pytest
import torch

from actbench.methods.randomized.ops.sketch import transforms
from actbench.methods.randomized.ops.sketch.transforms import fourier, hadamard, transform_rows

SIZES = [1, 2, 3, 4, 5, 8, 9, 12, 17, 64]


def identity(rows):
    return torch.eye(rows, dtype=torch.float64)


@pytest.mark.parametrize("rows", SIZES)
def test_the_dct_is_its_definition(rows):
    place = torch.arange(rows).double()
    expected = torch.cos(math.pi * place[:, None] * (2 * place + 1) / (2 * rows)) * math.sqrt(2 / rows)
    expected[0] /= math.sqrt(2)

    torch.testing.assert_close(transform_rows(identity(rows), torch.arange(rows), "dct"), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rows", SIZES)
def test_the_dft_is_orthonormal_cosines_and_sines(rows):
    found = transform_rows(identity(rows), torch.arange(rows), "dft")
    angle = 2 * math.pi * torch.arange(rows).double() / rows

    torch.testing.assert_close(found @ found.t(), identity(rows), atol=1e-12, rtol=0)
    if rows > 2:
        torch.testing.assert_close(found[1], math.sqrt(2 / rows) * angle.cos(), atol=1e-12, rtol=0)
        torch.testing.assert_close(found[rows // 2 + 1], -math.sqrt(2 / rows) * angle.sin(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("rows", SIZES)
def test_all_rows_of_the_signed_hadamard_transform_are_an_isometry(rows):
    padded = 2 ** math.ceil(math.log2(rows))
    found = hadamard(identity(rows), torch.tensor(3), padded)

    torch.testing.assert_close(found.abs(), torch.full_like(found, padded**-0.5))
    torch.testing.assert_close(found.t() @ found, identity(rows), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["dct", "dft"])
def test_a_sketch_is_scaled_rows_of_the_transform(kind):
    x = torch.randn(50, 3, dtype=torch.float64)
    found = fourier(x, torch.tensor(3), 200, kind)
    rows = transform_rows(x, torch.arange(50), kind) * math.sqrt(50 / 200)
    distance = (found[:, None] - rows).norm(dim=2).min(1)

    assert distance.values.max() < 1e-12
    assert 40 < len(distance.indices.unique()) <= 50


@pytest.mark.parametrize(
    "project",
    [
        lambda x: fourier(x, torch.tensor(1), 6, "dct"),
        lambda x: fourier(x, torch.tensor(1), 6, "dft"),
        lambda x: hadamard(x, torch.tensor(1), 6),
    ],
    ids=["dct", "dft", "hadamard"],
)
def test_columns_are_transformed_in_chunks_to_the_same_result(project, monkeypatch):
    x = torch.randn(100, 21, dtype=torch.float64)
    whole = project(x)
    monkeypatch.setattr(transforms, "CHUNK_BYTES", 0)
    monkeypatch.setattr(transforms, "_LEAST_COLUMNS", 4)

    torch.testing.assert_close(project(x), whole, rtol=1e-12, atol=1e-12)
