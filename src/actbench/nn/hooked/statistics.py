"""What operators save of statistics, which stays whole: it is small, and an error in it is one in every element.

Norms save a mean and a scale for each row or channel, be they operators of torch or written out; fused attention saves
the logarithm of a sum for each query.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

from actbench.nn.hooked.operators import told
from actbench.nn.layout import without_repeats

MOST_CHANNELS = 2**16
"""Elements up to which a vector is taken to have a number for each channel."""

_REDUCING = {
    "Amax", "Amin", "LinalgVectorNorm", "Logsumexp", "Max", "Mean", "Min", "Norm", "Std", "StdMean",
    "Sum", "Var", "VarMean",
}  # fmt: skip
_ELEMENT_BY_ELEMENT = {
    "Abs", "Add", "Alias", "Clamp", "ClampMax", "ClampMin", "Clone", "Div", "Exp", "Expand", "Log", "Maximum",
    "Minimum", "Mul", "Neg", "Pow", "Reciprocal", "Rsqrt", "Slice", "Sqrt", "Squeeze", "Sub", "ToCopy",
    "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
_FARTHEST = 8
"""Operators between a statistic and the sum that it was made of, at most."""


def statistic(tensor: Tensor) -> str | None:
    """Return that a tensor which is being saved is a statistic, as a reason to leave it whole, or None."""
    if told().is_statistic(tensor) or (tensor.is_floating_point() and _is_one_each_row(tensor)):
        return "a statistic, or goes with one"
    return None


def _is_one_each_row(tensor: Tensor) -> bool:
    """Return whether a tensor has one number for each row or channel, by its shape and by what it was made of.

    What has no graph was made inside of an operator; only its shape is known of it.
    """
    once = without_repeats(tensor)
    is_vector = once.dim() == 1 and once.numel() <= MOST_CHANNELS
    if tensor.grad_fn is None:
        return not tensor.requires_grad and (is_vector or (once.dim() > 1 and once.shape[-1] == 1))
    is_reduced = is_vector or 1 in once.shape[1:] or (once.shape[:1] == (1,) and once.numel() <= MOST_CHANNELS)
    return is_reduced and _is_of_sums(tensor.grad_fn, _FARTHEST)


def _is_of_sums(node: Node, farthest: int) -> bool:
    """Return whether all that a node was made of are sums and the like over a dimension, taken element by element."""
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    if name in _REDUCING:
        return True
    if name not in _ELEMENT_BY_ELEMENT or not farthest:
        return False
    makers = [maker for maker, _ in node.next_functions if maker is not None]
    return bool(makers) and all(_is_of_sums(maker, farthest - 1) for maker in makers)
