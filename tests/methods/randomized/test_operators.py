"""How many operators a sketched layer runs: each costs the host as much as a layer's whole product costs a card."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import actbench
from actbench.simulator import profiles
from actbench.simulator.card import place, simulated
from actbench.simulator.fake import fake_mode

ROWS = 4096
"""Of RoBERTa-base at batch 32 and 128 tokens."""


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "prim":  # questions to fake tensors
            self.ran[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("on_card", "width"), [(False, 8), (True, 8), (True, 768)])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_a_layer_runs_20_operators_forward_and_backward(kind, on_card, width):
    with ExitStack() as stack:
        if on_card:
            stack.enter_context(simulated(profiles.get("h100-80gb")))
            stack.enter_context(fake_mode())
            stack.enter_context(place())
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        model = actbench.convert(model, f"randomized:0.2,sketch={kind}")
        x = torch.ones(ROWS, width, requires_grad=True)
        grad = torch.ones(ROWS, width)
        model(x).backward(grad)  # the gradients of later steps are added

        with Counting() as counting:
            model(x).backward(grad)

    assert counting.ran["actbench::sketch_columns"] == 4
    assert counting.ran["actbench::sketch_halves"] == (4 if on_card and kind == "rademacher" else 0)
    assert counting.ran.total() / len(model) <= 20
