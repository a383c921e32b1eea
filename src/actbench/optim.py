"""Optimizers with less state, or state packed in a few bits or in host memory, and one that steps in the backward pass.

They belong to methods; each is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actbench.methods.formats.optim.base import PackedOptimizer
    from actbench.methods.formats.optim.optimizers import SGD, Adam, AdamW, packed
    from actbench.methods.offload.hostoptimizer import HostOptimizer
    from actbench.methods.optimizers.adammini import AdamMini
    from actbench.methods.optimizers.muon import Muon8bit
    from actbench.methods.optimizers.projected import Apollo, Fira, GaLore
    from actbench.methods.optimizers.schedulefree import ScheduleFreeAdamW
    from actbench.methods.release.inbackward import StepInBackward

__all__ = [
    "SGD",
    "Adam",
    "AdamMini",
    "AdamW",
    "Apollo",
    "Fira",
    "GaLore",
    "HostOptimizer",
    "Muon8bit",
    "PackedOptimizer",
    "ScheduleFreeAdamW",
    "StepInBackward",
    "packed",
]

_OPTIMIZERS = "actbench.methods.formats.optim.optimizers"
_PROJECTED = "actbench.methods.optimizers.projected"
_HOMES = {
    "SGD": _OPTIMIZERS,
    "Adam": _OPTIMIZERS,
    "AdamMini": "actbench.methods.optimizers.adammini",
    "AdamW": _OPTIMIZERS,
    "Apollo": _PROJECTED,
    "Fira": _PROJECTED,
    "GaLore": _PROJECTED,
    "HostOptimizer": "actbench.methods.offload.hostoptimizer",
    "Muon8bit": "actbench.methods.optimizers.muon",
    "PackedOptimizer": "actbench.methods.formats.optim.base",
    "ScheduleFreeAdamW": "actbench.methods.optimizers.schedulefree",
    "StepInBackward": "actbench.methods.release.inbackward",
    "packed": _OPTIMIZERS,
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'actbench.optim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
