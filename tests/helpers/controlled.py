"""A network and its loss, for the tests of controllers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actbench.packing.forwardwrapper import ReboundForward
from actbench.tools.convert.model import conversion_of


class Block(nn.Sequential):
    pass


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear(64, 64), nn.Tanh(), nn.BatchNorm1d(64)) for _ in range(3)))


def batch() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, rows: int = 32) -> Tensor:
    loss: Tensor = (model(batch()[:rows]) - batch().sin()[:rows]).square().mean()
    return loss


def is_plain(model: nn.Module) -> bool:
    bound = any(isinstance(vars(module).get("forward"), ReboundForward) for module in model.modules())
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not bound and not hooked and conversion_of(model) is None
