import pytest
import torch

from actbench.methods.randomized.ops.matrix import KINDS, sketch_rows
from actbench.methods.randomized.ops.sketch import transforms
from actbench.methods.randomized.ops.sketch.transforms import project


@pytest.mark.parametrize("kind", KINDS)
def test_project_is_the_product_with_the_matrix_of_the_seed(kind):
    x = torch.randn(500, 7, dtype=torch.float64)
    entries = sketch_rows(torch.tensor(3), 0, 500, 20, kind, torch.float64, x.device)

    torch.testing.assert_close(project(x, torch.tensor(3), 20, kind), entries.t() @ x / 20**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_the_chunks_changes_nothing_but_rounding(kind, monkeypatch):
    x = torch.randn(500, 7, dtype=torch.float64)
    whole = project(x, torch.tensor(3), 20, kind)
    monkeypatch.setattr(transforms, "CHUNK_BYTES", 0)
    monkeypatch.setattr(transforms, "_LEAST_ROWS", 3)

    torch.testing.assert_close(project(x, torch.tensor(3), 20, kind), whole, rtol=1e-12, atol=1e-12)


def test_the_matrix_is_never_held_whole(monkeypatch):
    made = []
    monkeypatch.setattr(
        transforms, "sketch_rows", lambda *args: made.append(args[2] * args[3] * 4) or sketch_rows(*args)
    )

    project(torch.ones(20_000, 2), torch.tensor(0), 1000, "rademacher")

    assert sum(made) == 20_000 * 1000 * 4
    assert max(made) <= 2 * 1024**2
