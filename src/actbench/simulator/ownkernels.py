"""What torch's own kernels, those of no library, allocate and free before they return, as torch 2.15 does.

Kernels that read dense tensors copy others first. On a CPU, elementwise kernels compute in one dtype, and copy operands
of others; CUDA's convert each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten

Formula = Callable[[Any, Any], int]
"""From an operator's arguments and its result to the bytes of its temporaries."""

_INDEX_BYTES = 8

_PROMOTED = frozenset(
    overload
    for packet in (
        *(aten.add, aten.sub, aten.mul, aten.div, aten.pow, aten.atan2, aten.fmod, aten.remainder),
        *(aten.maximum, aten.minimum, aten.fmax, aten.fmin, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
    )
    for overload in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
    if not str(overload).endswith("out")
)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def uncontiguous(*tensors: Tensor) -> int:
    """Return the bytes of copies of tensors that a kernel reads as contiguous."""
    return sum(bytes_of(each) for each in tensors if not each.is_contiguous())


_BLOCK = 60 * 60


def _turned(x: Tensor) -> int:
    """Return the bytes of the block by which a transposed matrix is copied, or a column that its strides call one."""
    is_transposed = x.dim() == 2 and x.stride() == (1, x.shape[0]) and x.numel() >= _BLOCK
    return _BLOCK * x.element_size() if is_transposed else 0


def _cloned(args: Any, result: Tensor) -> int:
    return _turned(args[0]) if result.is_contiguous() else 0


def _written(args: Any, result: Tensor) -> int:
    return _turned(args[1]) if result.is_contiguous() and result.dtype == args[1].dtype else 0


def _grouped(args: Any, result: Any) -> int:
    """Images are read in their layout, other tensors as contiguous."""
    x: Tensor = args[0]
    return 0 if x.is_contiguous(memory_format=suggest_memory_format(x)) else bytes_of(x)


def _copied(*places: int) -> Formula:
    """Return the formula of a kernel that reads the arguments at these places as contiguous."""

    def formula(args: Any, result: Any) -> int:
        read = [args[at] for at in places if isinstance(args[at], Tensor)]
        return uncontiguous(*read) + sum(_turned(each) for each in read if not each.is_contiguous())

    return formula


def _relaid(grad: Tensor, *others: Tensor) -> int:
    """Return the bytes of copies of tensors that are not in the layout of the first."""
    layout = suggest_memory_format(grad)
    return sum(bytes_of(each) for each in others if not each.is_contiguous(memory_format=layout))


def _promoted(args: Any, result: Any) -> int:
    """Copies of operands in the dtype that the kernel computes in; numbers and single elements are none."""
    tensors = [each for each in args[:2] if isinstance(each, Tensor)]
    if len({each.dtype for each in tensors}) == 1 and result.dtype in (tensors[0].dtype, torch.bool):
        return 0
    computed = torch.result_type(*args[:2])
    if result.dtype != torch.bool:
        computed = torch.promote_types(computed, result.dtype)
    return sum(each.numel() * computed.itemsize for each in tensors if each.dtype != computed and each.dim())


def _unfolded(args: Any, result: Tensor) -> int:
    """The result begins with the size of the input, and is allocated anew if that is too little; see ``hiddenmemory``."""
    return uncontiguous(args[0]) + (bytes_of(args[0]) if result.numel() > args[0].numel() else 0)


def _sorted(args: Any, result: Any) -> int:
    """A thread sorts a row beside its tensor."""
    x: Tensor = args[0]
    dim = args[1] if len(args) > 1 and type(args[1]) is int else -1
    return x.shape[dim] * _INDEX_BYTES if x.dim() else 0


def _kth(args: Any, result: Any) -> int:
    """All values are sorted in a copy, with their places."""
    x: Tensor = args[0]
    return bytes_of(x) + x.numel() * _INDEX_BYTES


def _whole(args: Any, result: Any) -> int:
    return bytes_of(args[0])


def _median(args: Any, result: Any) -> int:
    """Rows that are not dense are copied beside each other."""
    x: Tensor = args[0]
    if not x.dim() or x.stride(args[1]) <= 1:
        return 0
    return bytes_of(x) + (_turned(x.movedim(args[1], -1)) if x.dim() == 2 else 0)


def _index_widened(args: Any, result: Any) -> int:
    """Kernels read indices of 64 bits."""
    index: Tensor = args[2]
    return index.numel() * _INDEX_BYTES if index.dtype != torch.int64 else 0


def _rolled(args: Any, result: Tensor) -> int:
    """Dimensions are rolled one after the other, and each result waits until the last is done."""
    return bytes_of(result) * (len(args[2]) - 1) if len(args) > 2 and len(args[2]) > 1 else uncontiguous(args[0])


def _expanded(x: Tensor, batch: Any) -> int:
    """Return the bytes of a copy of matrices that are repeated over a batch."""
    expanded = x.expand(*batch, *x.shape[-2:])
    return expanded.numel() * x.element_size() if not expanded.is_contiguous() else 0


def _distances(args: Any, result: Tensor) -> int:
    """Matrices of points are copied where one stands for several of a batch; of ``_cdist_forward``."""
    x, y = args[:2]
    return sum(_expanded(each, result.shape[:-2]) for each in (x, y))


def _distances_backward(args: Any, result: Tensor) -> int:
    """As :func:`_distances`, of ``_cdist_backward``."""
    _, x, y, _, found = args[:5]
    return sum(_expanded(each, found.shape[:-2]) for each in (x, y))


def _soft_margins(args: Any, result: Tensor) -> int:
    """The negative target, its product with the input and the exponential are alive before the result is made."""
    return 2 * bytes_of(args[1])


def _margins(args: Any, result: Any) -> int:
    """``binary_cross_entropy_with_logits``: the loss of each element, a logarithm of a sigmoid and its buffer."""
    losses: int = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()  # type: ignore[no-untyped-call]
    each: int = args[0].element_size()
    return (3 if result.dim() == 0 else 2) * losses * each


_FEW_ROWS, _MANY_ROWS = 192, 768
_KEYS_AT_ONCE = 512


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Return how many rows and columns of scores of attention a thread computes at once."""
    rows, columns = query.shape[-2], key.shape[-2]
    return min(256 if rows >= _MANY_ROWS else 64 if rows >= _FEW_ROWS else 32, rows), min(_KEYS_AT_ONCE, columns)


def _attention(args: Any, result: Any) -> int:
    """Scores, sums, maxima and outputs of a tile, for each thread."""
    query, key = args[:2]
    rows, columns = _tile(query, key)
    width: int = query.shape[-1]
    return torch.get_num_threads() * rows * (columns + 2 + width) * 4


def _attention_backward(args: Any, result: Any) -> int:
    """Scores of a tile and their gradients, for each thread; the gradient is read with heads after rows."""
    grad, query, key = args[:3]
    rows, columns = _tile(query, key)
    return torch.get_num_threads() * rows * (2 * columns + 1) * 4 + uncontiguous(grad.transpose(1, 2))


_INDEXED = (aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default)


def _decomposed(args: Any, result: Any) -> int:
    """A decomposition overwrites a copy of its matrices, and tells in an integer of each whether it converged."""
    x: Tensor = args[0]
    return bytes_of(x) + 4 * math.prod(x.shape[:-2])


def _random_words(args: Any, result: Tensor) -> int:
    """Each of torch's operators that make the words has two tensors of their size beside its result."""
    return 2 * bytes_of(result)


_PIECE = 2**18
"""Elements that torch's operators encode at once where a whole tensor is one group."""


def _encoded_in_one(args: Any, result: Any) -> int:
    """Integers of 64 bits, and the numbers of stochastic rounding; the piece before keeps its codes meanwhile."""
    x, bits, _, stochastic = args
    each = (48 if stochastic else 32) + (8 if x.dtype == torch.float64 else 0)
    first, second = min(x.numel(), _PIECE), min(max(0, x.numel() - _PIECE), _PIECE)
    most: int = max(first * each, second * each + first * (8 + bits) // 8 if second else 0)
    return most


def _decoded_in_one(args: Any, result: Tensor) -> int:
    """Codes of a byte, and two forms of the numbers that they mean."""
    return min(result.numel(), _PIECE) * (17 if result.dtype == torch.float64 else 9)


_OWN: Mapping[str, Formula] = {
    "actbench::random_words": _random_words,
    "actbench::onegroup_encode": _encoded_in_one,
    "actbench::onegroup_decode": _decoded_in_one,
}
"""Formulas of operators of actbench that run torch's operators on every device, by name."""


def of_own(func: Any) -> Formula | None:
    """Return the formula of an operator of actbench, which its plug-in defines, or None."""
    return _OWN.get(func._schema.name) if func.namespace == "actbench" else None


EVERYWHERE: Mapping[Any, Formula] = {
    aten._linalg_svd.default: _decomposed,
    **dict.fromkeys((aten.im2col.default, aten.col2im.default), _unfolded),
    aten._cdist_forward.default: _distances,
    aten._cdist_backward.default: _distances_backward,
    aten.roll.default: _rolled,
    aten.soft_margin_loss_backward.default: _soft_margins,
}
"""Formulas of every device by operator, from its arguments and its result to bytes."""

ON_CPU: Mapping[Any, Formula] = {
    **dict.fromkeys(_PROMOTED, _promoted),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sorted),
    **dict.fromkeys((aten.median.default, aten.nanmedian.default), _whole),
    **dict.fromkeys((aten.median.dim, aten.nanmedian.dim), _median),
    **dict.fromkeys(_INDEXED, _index_widened),
    aten.clone.default: _cloned,
    aten.t_copy.default: lambda args, result: _turned(args[0].t()),
    aten.transpose_copy.int: lambda args, result: _turned(args[0].transpose(*args[1:])),
    aten.permute_copy.default: lambda args, result: _turned(args[0].permute(args[1])),
    aten.copy_.default: _written,
    aten.native_group_norm.default: _grouped,
    aten.kthvalue.default: _kth,
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _copied(0)),
    **dict.fromkeys((aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), _copied(0, 1)),
    aten.native_layer_norm.default: _copied(0),
    aten.native_layer_norm_backward.default: _copied(0, 1),
    aten.log_sigmoid_forward.default: _copied(0),
    aten.multi_margin_loss.default: _copied(0),
    aten.multi_margin_loss_backward.default: _copied(1),
    aten.multilabel_margin_loss_forward.default: _copied(0),
    aten.multilabel_margin_loss_backward.default: _copied(1),
    aten.binary_cross_entropy_with_logits.default: _margins,
    aten.max_unpool2d.default: lambda args, result: _relaid(args[0], args[1]),
    aten.adaptive_max_pool2d_backward.default: lambda args, result: _relaid(args[1], args[0], args[2]),
    **dict.fromkeys(
        (aten.replication_pad2d_backward.default, aten.reflection_pad2d_backward.default),
        lambda args, result: _relaid(args[0], args[1]),
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.normal.Tensor_float: _whole,
}
"""Formulas of a CPU."""
