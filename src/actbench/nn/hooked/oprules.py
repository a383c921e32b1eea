"""What is known of the tensors that an operator saves: by the operator that runs, by shape, and by the graph behind.

Norms save statistics beside their input, a mean and a scale for each row or channel. These stay whole: they are small,
and an error in one is an error in every element. Fused attention saves the logarithm of a sum for each query.
Log-softmax saves logarithms, of which backward needs the powers alone; the likelihood of classes saves scores of which
it needs the shape alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F

from actbench.nn.layout import without_repeats
from actbench.nn.wrapped import Rules

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


Test = Callable[[Tensor], bool]


def _never(_: Tensor) -> bool:
    return False


def _always(_: Tensor) -> bool:
    return True


class OpRule(NamedTuple):
    """What an operator says of what it saves.

    Attributes:
        is_statistic: Whether a tensor is a statistic, or goes with one.
        is_logarithm: Whether it is logarithms of probabilities that backward raises to powers; to be asked first, and
            once for each tensor, in the order in which they are saved.
        is_shape: Whether backward needs its shape alone.
        row: Elements of a row of the operator's input that is scaled by itself; 0 for none.
        is_product: Whether it is a product with a weight: of a linear layer or a convolution.
    """

    is_statistic: Test = _never
    is_logarithm: Test = _never
    is_shape: Test = _never
    row: int = 0
    is_product: bool = False


_NOTHING = OpRule()
_current: ContextVar[OpRule] = ContextVar("_current", default=_NOTHING)


def current_rule() -> OpRule:
    """Return what the operator that runs says of what it saves."""
    return _current.get()


_PRODUCTS = (
    F.linear, torch.addmm, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
)  # fmt: skip


@functools.cache
def op_rules() -> Rules:
    """Return rules, as for :class:`~actbench.nn.wrapped.Intercepted`, under which operators say what they save."""
    tells: dict[Callable[..., Any], Callable[..., OpRule]] = {
        F.layer_norm: _of_layer_norm,
        torch.layer_norm: _of_layer_norm,
        F.rms_norm: _of_layer_norm,
        F.group_norm: _of_group_norm,
        F.instance_norm: _of_norm,
        F.batch_norm: _of_norm,
        torch.batch_norm: _of_norm,
        F.log_softmax: _of_log_softmax,
        torch.log_softmax: _of_log_softmax,
        Tensor.log_softmax: _of_log_softmax,
        F.cross_entropy: _of_cross_entropy,
        F.nll_loss: _of_likelihood,
        F.ctc_loss: _of_paths,
        torch.ctc_loss: _of_paths,
        **dict.fromkeys(_PRODUCTS, _of_product),
    }
    return {function: functools.partial(_under, tell, function) for function, tell in tells.items()}


def _under(tell: Callable[..., OpRule], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _current.set(tell(*args, **kwargs))
    try:
        return function(*args, **kwargs)
    finally:
        _current.reset(token)


# Below, ``input`` is torch's name for the first argument of each.


def _of_norm(input: Tensor, *_: Any, row: int = 0, **__: Any) -> OpRule:  # noqa: A002
    """Return that all a norm saves but its input is a statistic: group norm's have a graph."""
    elements = input.numel()
    return OpRule(is_statistic=lambda tensor: tensor.numel() < elements, row=row)


def _of_layer_norm(input: Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any) -> OpRule:  # noqa: A002
    return _of_norm(input, row=math.prod(normalized_shape))


def _of_group_norm(input: Tensor, num_groups: int, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    return _of_norm(input, row=input.numel() // (input.shape[0] * num_groups) if input.numel() else 0)


def _of_log_softmax(input: Tensor, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    """Return that the first tensor that log-softmax has made is saved by itself; what reads it saves the others."""
    elements = input.numel()
    saved: list[bool] = []

    def is_result(tensor: Tensor) -> bool:
        node = tensor.grad_fn
        if saved or node is None or not node.name().startswith("LogSoftmax") or tensor.numel() != elements:
            return False
        saved.append(True)
        return True

    return OpRule(is_logarithm=is_result)


def _of_cross_entropy(input: Tensor, target: Tensor, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    """Return what log-softmax says, and the likelihood of the classes behind it."""
    softmax = _of_log_softmax(input)
    return softmax if target.is_floating_point() else softmax._replace(is_shape=_of_likelihood(input).is_shape)


def _of_likelihood(input: Tensor, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    elements = input.numel()
    return OpRule(is_shape=lambda tensor: tensor.requires_grad and tensor.numel() == elements)


def _of_product(*_: Any, **__: Any) -> OpRule:
    return OpRule(is_product=True)


def _of_paths(*_: Any, **__: Any) -> OpRule:
    """Return that all goes together: the sums over paths are powers of differences between what is saved."""
    return OpRule(is_statistic=_always)


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
    if current_rule().is_statistic(tensor) or (tensor.is_floating_point() and _is_one_each_row(tensor)):
        return "a statistic, or goes with one"
    return None


def _is_one_each_row(tensor: Tensor) -> bool:
    """Return whether a tensor has one number for each row or channel, by its shape and by what it was made of.

    What has no graph was made inside of an operator: its shape alone is known.
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
