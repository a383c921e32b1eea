"""What is replaced while a model is simulated is torch's own again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _device

from actbench.simulator.overrides import known_scalars, no_layerdrop_draws

SIMULATING = pytest.mark.parametrize(
    ("simulating", "function"),
    [(lambda: known_scalars(nn.Linear(2, 2)), torch.tensor), (no_layerdrop_draws, torch.rand)],
)


@SIMULATING
def test_torch_compile_knows_functions_of_torch_after_a_first_compilation_inside(
    simulating: Callable[[], AbstractContextManager[None]], function: Callable[..., torch.Tensor]
) -> None:
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    torch.compiler.reset()
    get_torch_obj_rule_map.cache_clear()  # as in a process that has compiled nothing yet
    with simulating():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert function not in get_torch_obj_rule_map()

    assert function in get_torch_obj_rule_map()
    torch.compile(lambda x: x + torch.tensor(1.0) + torch.rand(2), backend="eager", fullgraph=True)(torch.ones(2))
    torch.compiler.reset()


@SIMULATING
def test_a_device_in_context_is_that_of_all_functions_after_a_first_context_inside(
    simulating: Callable[[], AbstractContextManager[None]], function: Callable[..., torch.Tensor]
) -> None:
    _device._device_constructors.cache_clear()  # as in a process that has named no device in this way yet
    with simulating(), torch.device("meta"):
        torch.zeros(2)

    with torch.device("meta"):
        assert function([2]).device.type == "meta"


def test_the_number_that_layerdrop_draws_is_a_tensor_of_a_known_value() -> None:
    with FakeTensorMode(), no_layerdrop_draws():
        drawn = torch.rand([])
        assert isinstance(drawn, torch.Tensor)
        assert not drawn < 0.9
        assert drawn.to(torch.float64).item() == 1.0
        assert torch.rand([2]).shape == (2,)
