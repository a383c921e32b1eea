"""What every kind of sketch promises: an estimate without bias, of the variance that is written, and what is kept."""

import functools

import pytest
import torch

from actbench.methods.randomized.ops.sketch import KINDS, Sketching, batch_variance, compress, project, variance

TRIALS = 2500
KEYED = ["norm", "wta"]


def matrices(rows=6, seed=0):
    """Rows of unequal length with a common part: the estimate's noise does not drown Y^T X."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.linspace(0.3, 2, rows)[:, None]
    x = weight * (torch.randn(rows, 3, generator=generator) + 1)
    y = torch.randn(rows, 2, generator=generator) + 1
    return x.double(), y.double()


@functools.cache
def estimates(kind, size):
    """Estimates of one product; six rows are no power of two, and few enough to tell the kinds' variances apart."""
    x, y = matrices()
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # for so little, starting threads would take longer than the work
    for seed in range(TRIALS):
        sketch, key = compress(x, torch.tensor(seed), size, kind)
        found.append(project(y, key, size, kind).t() @ sketch)
    torch.set_num_threads(threads)
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


# Fast transforms of another kind, and twins: of normal numbers signs, of rows with replacement those without.
SLOW = ("hadamard", "dft", "rademacher", "rows")
some_kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.sampled(slow=4) if kind in SLOW else ()) for kind in KINDS]
)


@some_kinds
def test_the_estimate_of_a_product_is_unbiased(kind):
    """Entry by entry, and along the product itself, where a scale 1.5 times too large would be seen."""
    x, y = matrices()
    exact = y.t() @ x
    found = estimates(kind, 4)
    along = (found * exact).sum((1, 2)) / exact.square().sum()

    scores = torch.stack([z_score(found[:, i, j], exact[i, j]) for i in range(2) for j in range(3)])
    assert scores.abs().max() < 4
    assert abs(z_score(along, 1)) < 4
    assert abs(z_score(1.5 * along, 1)) > 4


@some_kinds
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.sampled(slow=4)), 4])
def test_the_variance_of_the_estimate_is_the_exact_formula(kind, size):
    x, y = matrices()
    errors = (estimates(kind, size) - y.t() @ x).square().sum((1, 2))
    expected = variance(kind, x, y, size)

    assert abs(z_score(errors, expected)) < 4
    assert abs(z_score(errors, 1.4 * expected)) > 4
    assert abs(z_score(errors, expected / 1.4)) > 4


def test_the_variances_are_the_closed_forms():
    """Of one row of X and Y that is not zero, everything but its place is known: a = b = c, |x|^2 |y|^2 = 4 * 9."""
    x, y = torch.zeros(5, 1), torch.zeros(5, 1)
    x[2], y[2] = 2, 3
    whole, size = 4 * 9, 2

    assert variance("rademacher", x, y, size) == pytest.approx(0)
    assert variance("gaussian", x, y, size) == pytest.approx((3 - 1) * whole / size, rel=1e-2)
    assert variance("hadamard", x, y, size) == pytest.approx(0)
    assert variance("rows", x, y, size) == pytest.approx((5 - 1) * whole / size)
    assert variance("rows_distinct", x, y, size) == pytest.approx((5 - 1) * whole / size * (5 - 2) / (5 - 1))
    assert variance("norm", x, y, size) == pytest.approx(0)
    assert variance("wta", x, y, size) == pytest.approx(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_that_is_kept_whole_has_no_variance(kind):
    assert variance(kind, *matrices(), 6) == 0


def test_a_constant_is_all_in_one_frequency():
    """Of rows that are all alike plain rows give it exactly, one frequency of 16 has it all."""
    x, y = torch.ones(16, 3), torch.ones(16, 2)
    exact = float((y.t() @ x).square().sum())

    assert variance("rows", x, y, 4) == pytest.approx(0, abs=1e-6 * exact)
    for kind in ("dct", "dft"):
        assert variance(kind, x, y, 4) == pytest.approx((16 - 1) / 4 * exact, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept(kind, dtype):
    x = torch.randn(40, 6).to(dtype)
    sketch, key = compress(x, torch.tensor(3), 8, kind)

    assert sketch.shape == (8, 6)
    assert sketch.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert sketch.untyped_storage().nbytes() == 8 * 6 * sketch.itemsize
    assert key.untyped_storage().nbytes() == (4 * 8 if kind in KEYED else 8)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_summed_in_float32(kind):
    x = (torch.randn(4000, 3) + 1).bfloat16()
    seed = torch.tensor(1)
    found, key = compress(x, seed, 8, kind)
    expected, same = compress(x.double(), seed, 8, kind)

    assert torch.equal(key, same)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        project(x, key, 8, kind).double(), project(x.double(), key, 8, kind), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_layout_changes_nothing(kind):
    x = torch.randn(5, 30, dtype=torch.float64).t()
    results = [compress(each, torch.tensor(1), 8, kind) for each in (x, x.contiguous())]

    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_without_columns_has_a_sketch_without_columns(kind):
    assert compress(torch.zeros(9, 0), torch.tensor(0), 2, kind)[0].shape == (2, 0)


def test_the_batch_variance_is_that_of_drawing_rows_with_replacement():
    """D_SGD^2 estimates from one batch the variance of B times the mean of B rows' products: here against its sum."""
    x, y = matrices(rows=9)
    products = torch.einsum("ri,rj->rij", y, x)
    about_mean = (products - products.mean(0)).square().sum()

    assert batch_variance(x, y) == pytest.approx(9 / 8 * float(about_mean))
