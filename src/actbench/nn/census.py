"""What a model holds: its kinds of layers, and the modules that compute attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn


def census(model: nn.Module, kinds: int = 6) -> str:
    """Return the commonest classes among the modules without children, such as ``20 Conv2d, 20 BatchNorm2d``.

    Args:
        model: The model.
        kinds: How many classes to name.
    """
    leaves = Counter(type(module).__name__ for module in model.modules() if not any(module.children()))
    named = [f"{count} {name}" for name, count in leaves.most_common(kinds)]
    if len(leaves) > kinds:
        named.append(f"{len(leaves) - kinds} other kinds")
    return ", ".join(named)


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
