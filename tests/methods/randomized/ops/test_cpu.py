import pytest
import torch

from actbench.methods.randomized.ops import matrix as sketch

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_the_number_of_threads_changes_nothing(kind):
    make = sketch.maker(3, 400, 100, kind, torch.float32, 1, CPU)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = make(torch.tensor(5))
        torch.set_num_threads(2)
        together = make(torch.tensor(5))
    finally:
        torch.set_num_threads(before)

    assert torch.equal(alone, together)
    assert alone.shape == (100, 400)


def test_rademacher_entries_are_signs():
    make = sketch.maker(0, 40, 10, "rademacher", torch.float32, 1, CPU)

    assert make(torch.tensor(5)).unique().tolist() == [-1, 1]
