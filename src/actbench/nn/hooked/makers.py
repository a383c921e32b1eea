"""What a saved tensor was made of, by the graph behind it."""

from __future__ import annotations

from torch import Tensor

_VIEWS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")
_MASKING = ("Log", "MaskedFill", "MaskedScatter", "Where")


def is_cast_of_parameter(tensor: Tensor) -> str | None:
    """Return that a tensor is a parameter in another type, as autocast makes it, as a reason to leave it; or None.

    Packed, its error would be one of the weight that every gradient further back is multiplied with.
    """
    maker = _maker(tensor)
    is_cast = maker == "torch::autograd::AccumulateGrad" and tensor.grad_fn is not None
    return "a parameter in another type" if is_cast else None


def may_be_infinite(tensor: Tensor) -> bool:
    """Return whether a tensor was made by an operator that writes minus infinity where something is masked."""
    return _maker(tensor).startswith(_MASKING)


def _maker(tensor: Tensor) -> str:
    """Return the name of the operator that made a tensor, behind views and casts; nothing where it has no graph."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return "" if node is None else node.name()
