"""Which modules of a model compute attention."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Give path and module of the outermost modules that compute attention, and of each softmax layer outside of them.

    Models name the class of these modules after what they do: ``nn.MultiheadAttention``, ``BertAttention``,
    ``ShiftedWindowAttention``.
    """
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        if "Attention" in type(module).__name__ or isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmax2d):
            inside.update(module.modules())
            yield path, module
