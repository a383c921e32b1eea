from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from actbench.codecs.encodings import Encoding
from actbench.ops.smaqstep import rules as steprules
from actbench.optim.base import Group, PackedOptimizer, State, in_float32, write_back
from actbench.optim.storage import Storage


class SGD(PackedOptimizer):
    """SGD with a packed momentum buffer; without momentum there is nothing to pack, and it is torch's.

    With ``smaq`` the buffer takes 0.8125 bytes a parameter, where float32 takes 4.

    Args:
        params: As in torch.
        lr: As in torch, as are the next four.
        momentum: Of the buffer.
        dampening: Of the gradient that is added to it.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum.
        maximize: As in torch.
        encoding: How the buffer is stored; None for float32.
        seed: Of the noise of rounding. Replicas of a parallel run must have the same.

    Raises:
        ValueError: torch does not take such an option.
        UsageError: There is no such encoding, or it cannot hold state.
    """

    twin: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    moments: ClassVar[dict[str, str]] = {"momentum_buffer": "packed_momentum_buffer"}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        encoding: str | Encoding | None = "smaq",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**options, "nesterov": nesterov, "maximize": maximize}, encoding, seed)

    def _has_moments(self, group: Group) -> bool:
        return bool(group["momentum"] != 0)

    def _update(
        self, p: Tensor, g: Tensor, group: Group, storage: Storage, state: State, seed: int, step: float
    ) -> None:
        storage.sgd(p, g, state["packed_momentum_buffer"], seed, steprules.sgd_rule(step, **_numbers(group)))

    def _step_others(self, parameters: list[Tensor], group: Group) -> None:
        if not parameters:
            return
        values = in_float32(parameters)
        buffers = [self.state[p].get("momentum_buffer") for p in parameters] if group["momentum"] else []
        gradients = in_float32(parameter.grad for parameter in parameters if parameter.grad is not None)
        buffers = buffers or [None] * len(parameters)
        sgd(values, gradients, buffers, **_numbers(group))
        for parameter, buffer in zip(parameters, buffers, strict=True):
            if buffer is not None:
                self.state[parameter]["momentum_buffer"] = buffer
        write_back(values, parameters)


def _numbers(group: Group) -> dict[str, Any]:
    names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return {"lr": float(group["lr"]), **{name: group[name] for name in names}}
