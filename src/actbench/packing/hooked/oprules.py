"""Classifies the tensors that an operator saves: by the running operator, by shape, and by the graph that made them.

Norms save statistics beside their input, a mean and a scale for each row or channel. These stay whole: they are small,
and an error in one is an error in every element. Fused attention saves the logarithm of a sum for each query.
Log-softmax saves logarithms, but its backward pass needs only their exponentials; the likelihood of classes saves
scores, but its backward pass needs only their shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F

from actbench.packing.layout import without_repeats
from actbench.packing.wrapped import Rules

_VIEWS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")
_MASKING = ("Log", "MaskedFill", "MaskedScatter", "Where")
IN_A_GRAPH = "torch::autograd::Error"
"""The node of what a graph that is traced is given."""
_OF_LEAVES = ("torch::autograd::AccumulateGrad", IN_A_GRAPH)


def is_cast_of_parameter(tensor: Tensor, maker: str) -> str | None:
    """Return a reason not to pack a tensor if it is a parameter cast to another type, as by autocast; else None.

    Its error would be an error of the weight, by which every earlier gradient is multiplied.
    """
    is_cast = maker in _OF_LEAVES and tensor.grad_fn is not None
    return "a parameter in another type" if is_cast else None


def may_be_infinite(maker: str) -> bool:
    """Return whether an operator writes minus infinity at masked elements."""
    return maker.startswith(_MASKING)


def maker_of(tensor: Tensor) -> str:
    """Return the name of the operator that made a tensor, before views and casts; empty if it has no graph."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return "" if node is None else node.name()


Test = Callable[[Tensor], bool]


def _never(_: Tensor) -> bool:
    return False


class OpRule(NamedTuple):
    """How to treat the tensors that an operator saves.

    Attributes:
        is_statistic: Whether a tensor is a statistic, or goes with one.
        is_logarithm: Whether a tensor holds logarithms of probabilities that backward exponentiates; ask this first,
            and once for each tensor, in the order in which they are saved.
        is_shape: Whether backward needs only the shape of a tensor.
        row: Elements of a row of the operator's input that is normalised by itself; 0 for none.
        is_product: Whether the operator is a product with a weight: a linear layer or a convolution.
        reason: Why statistics stay whole, as users are told.
    """

    is_statistic: Test = _never
    is_logarithm: Test = _never
    is_shape: Test = _never
    row: int = 0
    is_product: bool = False
    reason: str = "a statistic, or goes with one"


_NOTHING, _PRODUCT = OpRule(), OpRule(is_product=True)
_current: ContextVar[OpRule] = ContextVar("_current", default=_NOTHING)


def current_rule() -> OpRule:
    """Return the rule of the operator that runs."""
    return _current.get()


@contextmanager
def all_stays_whole() -> Iterator[None]:
    """Let all stay whole that operators save inside the context."""
    token = _current.set(OpRule(is_statistic=lambda _: True))
    try:
        yield
    finally:
        _current.reset(token)


_PRODUCTS = (
    F.linear, torch.addmm, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
)  # fmt: skip


@functools.cache
def op_rules() -> Rules:
    """Return rules for :class:`~actbench.packing.wrapped.Intercepted`: each operator sets its own while it runs."""
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
        **dict.fromkeys((F.ctc_loss, torch.ctc_loss), _of_paths),
        **dict.fromkeys(_PRODUCTS, lambda *_, **__: _PRODUCT),
    }
    return {function: functools.partial(_under, tell, function) for function, tell in tells.items()}


_QUOTIENTS = ("div", "true_divide", "divide", "remainder", "fmod")
_POWERS = ("pow", "float_power", "__pow__", "__ipow__")
_ROOTS_AND_LOGARITHMS = (
    "sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "log1p", "logit", "xlogy", "entr", "log_ndtr",
    "logcumsumexp", "acosh", "arccosh", "atan2", "arctan2", "hypot", "lgamma", "digamma", "polygamma", "mvlgamma",
    "multigammaln", "addcdiv", "__rdiv__",
)  # fmt: skip
_WITHIN = (F.softsign, F.local_response_norm, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
_LOSSES = (F.binary_cross_entropy, F.gaussian_nll_loss, F.kl_div, F.poisson_nll_loss)


@functools.cache
def divisor_rules() -> Rules:
    """Return rules for codecs whose elements may decode to 0: what backward divides by stays whole.

    That is divisors, the arguments of logarithms, roots and powers below 1, and what these return.
    """
    rules: dict[Callable[..., Any], Callable[..., Any]] = {}
    for tell, names, others in (
        (_of_quotient, _QUOTIENTS, ()),
        (_of_power, _POWERS, ()),
        (_of_divisors, _ROOTS_AND_LOGARITHMS, _LOSSES),
        (_of_all_but_input, (), _WITHIN),
    ):
        in_place = [name + "_" for name in names]
        homes = (torch, Tensor, torch.special)
        named = [getattr(home, name) for name in (*names, *in_place) for home in homes if hasattr(home, name)]
        rules |= {each: functools.partial(_under, tell, each) for each in (*named, *others)}
    return rules


def _under(tell: Callable[..., OpRule], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _current.set(tell(*args, **kwargs))
    try:
        return function(*args, **kwargs)
    finally:
        _current.reset(token)


# Below, ``input`` is torch's name for the first argument of each.


def _of_norm(input: Tensor, *_: Any, row: int = 0, **__: Any) -> OpRule:  # noqa: A002
    """Return that all that a norm saves except its input is a statistic; those of group norm have a graph."""
    elements = input.numel()
    return OpRule(is_statistic=lambda tensor: tensor.numel() < elements, row=row)


def _of_layer_norm(input: Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any) -> OpRule:  # noqa: A002
    return _of_norm(input, row=math.prod(normalized_shape))


def _of_group_norm(input: Tensor, num_groups: int, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    return _of_norm(input, row=input.numel() // (input.shape[0] * num_groups) if input.numel() else 0)


def _of_log_softmax(input: Tensor, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    """Return that log-softmax itself saves only its first result; operators that read the result save the others."""
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
    """Return the rules of log-softmax and of the likelihood of classes after it."""
    softmax = _of_log_softmax(input)
    return softmax if target.is_floating_point() else softmax._replace(is_shape=_of_likelihood(input).is_shape)


def _of_likelihood(input: Tensor, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    elements = input.numel()
    return OpRule(is_shape=lambda tensor: tensor.requires_grad and tensor.numel() == elements)


def _of_paths(*_: Any, **__: Any) -> OpRule:
    """Return that all saved tensors stay whole: the sums over paths exponentiate differences between them."""
    return OpRule(is_statistic=lambda _: True)


_DIVISOR = "the backward pass divides by it"


def _of_divisors(*_: Any, **__: Any) -> OpRule:
    return OpRule(is_statistic=lambda _: True, reason=_DIVISOR)


def _of_quotient(input: Tensor, other: Any, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    return OpRule(is_statistic=lambda tensor: tensor is other, reason=_DIVISOR)


def _of_power(input: Any, exponent: Any, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    """Return the rule of a power: one by a number of 1 or more has a derivative that is finite at 0."""
    is_finite = not isinstance(exponent, Tensor | complex) and exponent >= 1
    return _NOTHING if is_finite else _of_divisors()


def _of_all_but_input(input: Tensor, *_: Any, **__: Any) -> OpRule:  # noqa: A002
    """Return the rule of functions with a quotient or a root inside: they multiply by the input, if anything."""
    return OpRule(is_statistic=lambda tensor: tensor is not input, reason=_DIVISOR)


MOST_CHANNELS = 2**16
"""The most elements of a vector that counts as one number for each channel."""

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
"""The most operators between a statistic and the sum that it was made of."""


def statistic(tensor: Tensor, operator: OpRule) -> str | None:
    """Return a reason not to pack a tensor that an operator saves if it is a statistic, else None."""
    if operator.is_statistic(tensor):
        return operator.reason
    return _NOTHING.reason if tensor.is_floating_point() and _is_one_each_row(tensor) else None


def _is_one_each_row(tensor: Tensor) -> bool:
    """Return whether a tensor has one number for each row or channel, by its shape and the graph that made it.

    A tensor without a graph was made inside an operator: only its shape is known.
    """
    shape = tensor.shape
    if len(shape) > 1 and 1 not in shape and 0 not in tensor.stride():  # as nearly always
        return False
    if tensor.grad_fn is None and tensor.requires_grad:
        return False
    once = without_repeats(tensor)
    is_vector = once.dim() == 1 and once.numel() <= MOST_CHANNELS
    if tensor.grad_fn is None:
        return is_vector or (once.dim() > 1 and once.shape[-1] == 1)
    is_reduced = is_vector or 1 in once.shape[1:] or (once.shape[:1] == (1,) and once.numel() <= MOST_CHANNELS)
    return is_reduced and _is_of_sums(tensor.grad_fn, _FARTHEST)


def _is_of_sums(node: Node, farthest: int) -> bool:
    """Return whether a node was made, element by element, only of sums and the like over a dimension."""
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    if name in _REDUCING:
        return True
    if name not in _ELEMENT_BY_ELEMENT or not farthest:
        return False
    makers = [maker for maker, _ in node.next_functions if maker is not None]
    return bool(makers) and all(_is_of_sums(maker, farthest - 1) for maker in makers)
