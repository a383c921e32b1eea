"""What operators make of tensors inside of one call, where no tracker sees it, on the CPU and on CUDA alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from actbench.ops import noise  # noqa: F401  (defines an operator that is named here)


def _svd(args: Any, result: Any) -> int:
    """A decomposition overwrites a copy of its matrices, and tells in an integer of each whether it converged."""
    x: Tensor = args[0]
    return x.numel() * x.element_size() + 4 * math.prod(x.shape[:-2])


def _random_words(args: Any, result: Tensor) -> int:
    """Each of torch's operators that make the words has two tensors of their size beside its result."""
    return 2 * result.numel() * result.element_size()


TEMPORARIES: Mapping[Any, Callable[[Any, Any], int]] = {
    torch.ops.aten._linalg_svd.default: _svd,
    torch.ops.actbench.random_words.default: _random_words,
}
"""From an operator to its temporaries, by its arguments and its result."""
