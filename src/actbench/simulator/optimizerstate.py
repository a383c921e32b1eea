"""The optimizer's part of a simulated step: its state, made once, and the implementation that the device would run."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from actbench.measuring.meters.peak import alive
from actbench.ops import hostmemory
from actbench.scheme.setup import TrainStep
from actbench.simulator.tracker import StorageTracker


def make_state(step: TrainStep, tracker: StorageTracker) -> tuple[int, int]:
    """Step the optimizer once; return the bytes by which its state grows, and those that cycles held until then."""
    before, passed = tracker.live_bytes, len(tracker.events)
    step.optimizer.step()
    stepped = len(tracker.events)
    settle_state(step, tracker)
    older = alive(tracker.events[:passed])
    cyclic = sum(older.get(name, 0) for name, amount in tracker.events[stepped:] if not amount)
    return tracker.live_bytes - before + cyclic, cyclic


def settle_state(step: TrainStep, tracker: StorageTracker) -> None:
    """Bring memory from the first step to the state of later ones: counters in host memory, and no garbage."""
    counters = _step_counters(step.optimizer)
    if tracker.host_is_free:
        for counter in counters:
            hostmemory.mark(counter.untyped_storage())
        tracker.add(counters)
    gc.collect()
    tracker.reset_peak()


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Choose torch.optim's default implementation for CUDA parameters."""
    if isinstance(getattr(optimizer, "inner", optimizer), torch.optim.Adafactor):
        return  # it steps parameter by parameter on every device
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _step_counters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the step counters of Adam and others; for CUDA parameters they are on the host, unless fused."""
    groups = [group for group in optimizer.param_groups if not (group.get("fused") or group.get("capturable"))]
    states = [optimizer.state.get(parameter) for group in groups for parameter in group["params"]]
    counters = [state.get("step") for state in states if isinstance(state, dict)]
    return [counter for counter in counters if isinstance(counter, Tensor) and counter.dim() == 0]
