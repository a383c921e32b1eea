"""The optimizer's part of a simulated step: its state, made once, and the implementation that the device would run."""

from __future__ import annotations

import gc

import torch

from actbench.measuring.meters.peak import alive
from actbench.scheme.setup import TrainStep
from actbench.simulator.places import is_on_card
from actbench.simulator.tracker import StorageTracker


def make_state(step: TrainStep, tracker: StorageTracker) -> tuple[int, int]:
    """Step the optimizer once; return the bytes by which its state grows, and those that cycles held until then."""
    before, passed = tracker.live_bytes, len(tracker.events)
    step.optimizer.step()
    stepped = len(tracker.events)
    settle_state(tracker)
    older = alive(tracker.events[:passed])
    cyclic = sum(older.get(name, 0) for name, amount in tracker.events[stepped:] if not amount)
    return tracker.live_bytes - before + cyclic, cyclic


def settle_state(tracker: StorageTracker) -> None:
    """Bring memory from the first step to the state of later ones, without garbage."""
    # what waits in cycles would be freed at any moment of the second step, and in none of the later ones
    gc.collect()
    tracker.reset_peak()


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Choose torch.optim's default implementation for CUDA parameters."""
    if isinstance(getattr(optimizer, "inner", optimizer), torch.optim.Adafactor):
        return  # it steps parameter by parameter on every device
    for group in optimizer.param_groups:
        is_unset = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_unset and all(map(is_on_card, group["params"])):
            group["foreach"] = True
