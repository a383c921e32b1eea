import pytest
import torch

from actbench.methods.randomized.ops import matrix as sketch
from actbench.methods.randomized.ops.matrix import gaussian_table

TABLES = {"gaussian": gaussian_table(), "rademacher": None}


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_the_number_of_threads_changes_nothing(kind):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = sketch.columns_on_cpu(torch.tensor(5), 3, 400, 100, TABLES[kind])
        torch.set_num_threads(2)
        together = sketch.columns_on_cpu(torch.tensor(5), 3, 400, 100, TABLES[kind])
    finally:
        torch.set_num_threads(before)

    assert torch.equal(alone, together)
    assert alone.shape == (100, 400)


def test_rademacher_entries_are_signs():
    assert sketch.columns_on_cpu(torch.tensor(5), 0, 40, 10, None).unique().tolist() == [-1, 1]
