"""What is known of the tensors that an operator saves while it runs, and cannot be seen by themselves.

Norms save statistics beside their input; log-softmax saves logarithms, of which backward needs the powers alone;
the likelihood of classes saves scores of which it needs the shape alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.nn.intercepted import Rules

Test = Callable[[Tensor], bool]


def _never(_: Tensor) -> bool:
    return False


def _always(_: Tensor) -> bool:
    return True


class Told(NamedTuple):
    """What an operator says of what it saves.

    Attributes:
        is_statistic: Whether a tensor is a statistic, or goes with one.
        is_logarithm: Whether it is logarithms of probabilities that backward raises to powers; to be asked once for
            each tensor, in the order in which they are saved, and first of all.
        is_shape: Whether backward needs nothing of it but its shape.
        row: Elements of a row of its input that is scaled by itself; 0 for none.
    """

    is_statistic: Test = _never
    is_logarithm: Test = _never
    is_shape: Test = _never
    row: int = 0


_NOTHING = Told()
_told: ContextVar[Told] = ContextVar("_told", default=_NOTHING)


def told() -> Told:
    """Return what the operator that runs says of what it saves."""
    return _told.get()


@functools.cache
def telling() -> Rules:
    """Return rules, as for :class:`~actbench.nn.intercepted.Intercepted`, under which operators say what they save."""
    tells: dict[Callable[..., Any], Callable[..., Told]] = {
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
    }
    return {function: functools.partial(_under, tell, function) for function, tell in tells.items()}


def _under(tell: Callable[..., Told], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _told.set(tell(*args, **kwargs))
    try:
        return function(*args, **kwargs)
    finally:
        _told.reset(token)


# Below, ``input`` is torch's name for the first argument of each.


def _of_norm(input: Tensor, *_: Any, row: int = 0, **__: Any) -> Told:  # noqa: A002
    """Return that all a norm saves but its input is a statistic: group norm's have a graph."""
    elements = input.numel()
    return Told(is_statistic=lambda tensor: tensor.numel() < elements, row=row)


def _of_layer_norm(input: Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any) -> Told:  # noqa: A002
    return _of_norm(input, row=math.prod(normalized_shape))


def _of_group_norm(input: Tensor, num_groups: int, *_: Any, **__: Any) -> Told:  # noqa: A002
    return _of_norm(input, row=input.numel() // (input.shape[0] * num_groups) if input.numel() else 0)


def _of_log_softmax(input: Tensor, *_: Any, **__: Any) -> Told:  # noqa: A002
    """Return that the first tensor that log-softmax has made is saved by itself; the others are by what reads it."""
    elements = input.numel()
    saved: list[bool] = []

    def is_result(tensor: Tensor) -> bool:
        node = tensor.grad_fn
        if saved or node is None or not node.name().startswith("LogSoftmax") or tensor.numel() != elements:
            return False
        saved.append(True)
        return True

    return Told(is_logarithm=is_result)


def _of_cross_entropy(input: Tensor, target: Tensor, *_: Any, **__: Any) -> Told:  # noqa: A002
    """Return what log-softmax says, and the likelihood of the classes behind it."""
    softmax = _of_log_softmax(input)
    return softmax if target.is_floating_point() else softmax._replace(is_shape=_of_likelihood(input).is_shape)


def _of_likelihood(input: Tensor, *_: Any, **__: Any) -> Told:  # noqa: A002
    elements = input.numel()
    return Told(is_shape=lambda tensor: tensor.requires_grad and tensor.numel() == elements)


def _of_paths(*_: Any, **__: Any) -> Told:
    """Return that all goes together: the sums over paths are powers of differences between what is saved."""
    return Told(is_statistic=_always)
