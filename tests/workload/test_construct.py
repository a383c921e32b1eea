from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

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


class Drawing(TorchDispatchMode):
    """Counts operators that draw random numbers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
        return func(*args, **(kwargs or {}))


def small_llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), lambda: nn.Embedding(3, 2), small_llama])
def test_random_numbers_are_drawn_only_for_parameters_with_values(make: Callable[[], nn.Module]) -> None:
    with Drawing() as real:
        construct(make, materialize=True, seed=0)
    with Drawing() as shapes:
        construct(make, materialize=False, seed=0)

    assert real.count > 0
    assert shapes.count == 0


def test_a_table_is_drawn_without_values_of_parameters() -> None:
    def make() -> nn.Module:
        module = Computed()
        module.register_buffer("noise", torch.zeros(3).normal_())
        return module

    assert construct(make, materialize=False, seed=0).noise.any()


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
