"""What torch's optimizers do with the parameters of a CUDA device, and not with those of a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Choose torch.optim's default implementation for CUDA parameters."""
    if isinstance(getattr(optimizer, "inner", optimizer), torch.optim.Adafactor):
        return  # it steps parameter by parameter on every device
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def step_counters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the step counters of Adam and others; for CUDA parameters they are on the host, unless fused."""
    groups = [group for group in optimizer.param_groups if not (group.get("fused") or group.get("capturable"))]
    states = [optimizer.state.get(parameter) for group in groups for parameter in group["params"]]
    counters = [state.get("step") for state in states if isinstance(state, dict)]
    return [counter for counter in counters if isinstance(counter, Tensor) and counter.dim() == 0]
