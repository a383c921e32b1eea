from __future__ import annotations

import torch
from torch import nn

from actbench.workload.base import construct, seeded


class Computed(nn.Module):
    """Sizes itself by values of a tensor, ties two weights, keeps a table."""

    def __init__(self) -> None:
        super().__init__()
        widths = torch.linspace(8, 16, 2).int().tolist()
        self.first = nn.Linear(widths[0], widths[1])
        self.second = nn.Linear(widths[0], widths[1])
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(3))


def test_without_values_parameters_are_on_meta_and_the_rest_is_real() -> None:
    module = construct(Computed, materialize=False, seed=0)

    assert module.first.weight.is_meta
    assert module.first.weight is module.second.weight
    assert module.table.tolist() == [0, 1, 2]
    assert module.training


def test_the_seed_decides_the_values_and_nothing_else_is_touched() -> None:
    before = torch.get_rng_state()

    first, again = (construct(Computed, materialize=True, seed=3) for _ in range(2))

    assert torch.equal(first.first.weight, again.first.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_comes_back_after_an_exception() -> None:
    before = torch.get_rng_state()
    try:
        with seeded(1):
            torch.rand(3)
            raise KeyError
    except KeyError:
        pass

    assert torch.equal(torch.get_rng_state(), before)
