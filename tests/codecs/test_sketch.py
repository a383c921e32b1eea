import pytest
import torch

from actbench.codecs import sketch
from actbench.codecs.sketch import Sketching, batch_variance, product_variance, project
from actbench.ops.sketch import sketch_rows

KINDS = ["gaussian", "rademacher"]
TRIALS = 3000


def matrices(rows=9, seed=0):
    """Rows of unequal length with a common part: the estimate's noise does not drown Y^T X."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.linspace(0.5, 2, rows)[:, None]
    x = weight * (torch.randn(rows, 5, generator=generator) + 1)
    y = weight * (torch.randn(rows, 4, generator=generator) + 1)
    return x.double(), y.double()


def estimates(x, y, size, kind):
    found = []
    for seed in range(TRIALS):
        number = torch.tensor(seed)
        found.append(project(y, number, size, kind).t() @ project(x, number, size, kind))
    return torch.stack(found)


def z_score(samples, expected):
    return (samples.mean() - expected) / (samples.std() / len(samples) ** 0.5)


@pytest.mark.parametrize(
    ("sketching", "rows", "expected"),
    [
        (Sketching(ratio=0.2), 1000, 200),
        (Sketching(ratio=0.2), 1004, 200),
        (Sketching(ratio=0.1), 9, 1),
        (Sketching(ratio=0.1), 0, 1),
        (Sketching(ratio=1.0), 7, 7),
        (Sketching(ratio=0.2, min=50), 100, 50),
        (Sketching(ratio=0.2, max=50), 1000, 50),
        (Sketching(ratio=0.2, dim=7), 1000, 7),
        (Sketching(ratio=0.2, dim=70, max=50), 1000, 50),
    ],
)
def test_the_size_of_a_sketch(sketching, rows, expected):
    assert sketching.size(rows) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_project_is_the_product_with_the_matrix_of_the_seed(kind):
    x = torch.randn(500, 7, dtype=torch.float64)
    entries = sketch_rows(torch.tensor(3), 0, 500, 20, kind, torch.float64, x.device)

    torch.testing.assert_close(project(x, torch.tensor(3), 20, kind), entries.t() @ x / 20**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_the_chunks_changes_nothing_but_rounding(kind, monkeypatch):
    x = torch.randn(500, 7, dtype=torch.float64)
    whole = project(x, torch.tensor(3), 20, kind)
    monkeypatch.setattr(sketch, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(sketch, "_LEAST_ROWS", 3)

    torch.testing.assert_close(project(x, torch.tensor(3), 20, kind), whole, rtol=1e-12, atol=1e-12)


def test_the_matrix_is_never_held_whole(monkeypatch):
    made = []
    monkeypatch.setattr(sketch, "sketch_rows", lambda *args: made.append(args[2] * args[3] * 4) or sketch_rows(*args))

    project(torch.ones(20_000, 2), torch.tensor(0), 1000, "rademacher")

    assert sum(made) == 20_000 * 1000 * 4
    assert max(made) <= 2 * 1024**2


def test_half_precision_is_summed_in_float32():
    x = (torch.randn(4000, 3) + 1).bfloat16()
    seed = torch.tensor(1)

    found = project(x, seed, 8, "gaussian")

    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), project(x.double(), seed, 8, "gaussian"), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_of_a_product_is_unbiased(kind):
    """Entry by entry, and along the product itself, where a scale 5 % off would be seen."""
    x, y = matrices()
    exact = y.t() @ x
    found = estimates(x, y, 6, kind)
    along = (found * exact).sum((1, 2)) / exact.square().sum()

    scores = torch.stack([z_score(found[:, i, j], exact[i, j]) for i in range(4) for j in range(5)])
    assert scores.abs().max() < 4.5
    assert abs(z_score(along, 1)) < 4
    assert abs(z_score(1.05 * along, 1)) > 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 6])
def test_the_variance_of_the_estimate_is_the_exact_formula(kind, size):
    """Few rows, so that the two kinds' variances are far enough apart to be told from each other."""
    x, y = matrices(rows=4)
    errors = (estimates(x, y, size, kind) - y.t() @ x).square().sum((1, 2))
    other = "rademacher" if kind == "gaussian" else "gaussian"

    assert abs(z_score(errors, product_variance(x, y, size, kind))) < 4
    assert abs(z_score(errors, product_variance(x, y, size, other))) > 4


def test_the_batch_variance_is_that_of_drawing_rows_with_replacement():
    """D_SGD^2 estimates from one batch the variance of B times the mean of B rows' products: here against its sum."""
    x, y = matrices(rows=9)
    products = torch.einsum("ri,rj->rij", y, x)
    about_mean = (products - products.mean(0)).square().sum()

    assert batch_variance(x, y) == pytest.approx(9 / 8 * float(about_mean))
