import pytest
import torch

from actbench.methods.randomized.ops.halves import sketch_halves
from actbench.methods.randomized.ops.matrix import KINDS, sketch_columns
from actbench.methods.randomized.ops.sketch import transforms
from actbench.methods.randomized.ops.sketch.transforms import project


@pytest.mark.parametrize("kind", KINDS)
def test_project_is_the_product_with_the_matrix_of_the_seed(kind):
    x = torch.randn(500, 7, dtype=torch.float64)
    entries = sketch_columns(torch.tensor(3), 0, 500, 20, kind, torch.float64)

    torch.testing.assert_close(project(x, torch.tensor(3), 20, kind), entries @ x / 20**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_the_chunks_changes_nothing_but_rounding(kind, monkeypatch):
    x = torch.randn(500, 7, dtype=torch.float64)
    whole = project(x, torch.tensor(3), 20, kind)
    monkeypatch.setattr(transforms, "PIECE_BYTES", 0)
    monkeypatch.setattr(transforms, "_LEAST_ROWS", 3)

    torch.testing.assert_close(project(x, torch.tensor(3), 20, kind), whole, rtol=1e-12, atol=1e-12)


def test_the_matrix_is_never_held_whole(monkeypatch):
    made = []
    maker = transforms.sketch.maker
    monkeypatch.setattr(transforms.sketch, "maker", lambda *form: made.append(form[1] * form[2] * 4) or maker(*form))

    project(torch.ones(20_000, 2), torch.tensor(0), 1000, "rademacher")

    assert sum(made) == 20_000 * 1000 * 4
    assert max(made) <= transforms.PIECE_BYTES < sum(made)


@pytest.fixture
def as_a_card(monkeypatch):
    """Projections as on a card, with the same operands, but each product in float64."""
    monkeypatch.setattr(transforms, "is_elsewhere", lambda x: True)
    monkeypatch.setattr(transforms, "_wide_product", lambda a, b: (a.double() @ b.double()).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("piece", [0, transforms.PIECE_BYTES])
def test_a_card_multiplies_signs_with_halves_that_lose_2_to_the_minus_16_of_the_sketch(
    dtype, piece, as_a_card, monkeypatch
):
    x = (torch.randn(500, 7) * torch.logspace(-3, 3, 7)).to(dtype)
    exact = project(x.double(), torch.tensor(3), 20, "rademacher")
    monkeypatch.setattr(transforms, "PIECE_BYTES", piece)

    found = project(x, torch.tensor(3), 20, "rademacher")

    assert found.dtype == torch.float32
    assert ((found - exact).norm(dim=0) <= 2**-16 * exact.norm(dim=0)).all()


def test_halves_keep_each_number_to_2_to_the_minus_17():
    x = torch.randn(1000, 3) * torch.logspace(-20, 20, 3)

    high, low = sketch_halves(x, 1.0).double().split(1000)

    assert ((high + low - x).abs() <= 2**-17 * x.abs()).all()
    assert not torch.equal(high, x.double())
