"""Which layers are linear: ``nn.Linear`` and ``Conv1D`` of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_conv1d(kind: type[Any]) -> bool:
    """Return whether a class is ``Conv1D`` of transformers: a linear layer with a (d_in, d_out) weight.

    The check is by name, so that a model without it needs no transformers.
    """
    return f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D"


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is exactly ``nn.Linear`` or ``Conv1D``, not a subclass."""
    return type(layer) is nn.Linear or is_conv1d(type(layer))
