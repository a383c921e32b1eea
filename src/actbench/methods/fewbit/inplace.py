"""Applies autograd functions that may overwrite their input, in compiled graphs too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def applied(function: type[Any], x: Tensor, exact: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
    """Return what an autograd function returns for x and an exact layer; if the layer works in place, that is x.

    Where an autograd function overwrites an input of a graph that ``torch.compile`` makes, torch 2.11 to 2.15 computes
    wrong gradients. So there it overwrites a copy, and the result is copied back; inductor makes neither copy.

    Args:
        function: An autograd function whose first arguments are x and ``exact``.
        x: Its input.
        exact: The layer.
        arguments: Its further arguments.
    """
    overwrites = torch.compiler.is_compiling() and getattr(exact, "inplace", False)
    found: Tensor = function.apply(x.clone() if overwrites else x, exact, *arguments)
    return x.copy_(found) if overwrites else found
