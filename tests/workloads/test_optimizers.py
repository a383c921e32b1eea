from __future__ import annotations

import pytest
from torch import nn

from actbench.results.records import Optimizer
from actbench.workloads.base import make_optimizer


@pytest.mark.parametrize(
    ("name", "kind", "states"),
    [("adamw", "AdamW", 3), ("adam", "Adam", 3), ("sgd", "SGD", 0), ("sgd-momentum", "SGD", 1)],
)
def test_the_optimizer_has_its_kind_and_state_and_leaves_frozen_weights(
    name: Optimizer, kind: str, states: int
) -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    model.weight.sum().backward()

    optimizer = make_optimizer(name)(model)
    before = model.weight.detach().clone()
    optimizer.step()

    assert type(optimizer).__name__ == kind
    assert [id(value) for group in optimizer.param_groups for value in group["params"]] == [id(model.weight)]
    assert not before.equal(model.weight)
    # Adam keeps a step counter and two moments, SGD with momentum one buffer, plain SGD nothing but None.
    assert sum(value is not None for value in optimizer.state[model.weight].values()) == states
