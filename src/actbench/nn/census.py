"""What a model is made of, in a line, for the message that says what a scheme did not find."""

from __future__ import annotations

from collections import Counter

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
