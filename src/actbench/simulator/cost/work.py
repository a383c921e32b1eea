"""What one operator does: floating-point operations, bytes moved, kernels launched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from actbench.simulator import recurrent
from actbench.simulator.cost.collectives import Collective
from actbench.simulator.cost.kinds import IGNORED, NOTHING, Kind, has_channels_last, kind_of
from actbench.simulator.cost.rates import Precision
from actbench.simulator.places import is_on_card

_HALVES = (torch.float16, torch.bfloat16)
# depth_to_max_tensors of MultiTensorApply.cuh, of three lists, in the 4 KB of arguments before CUDA 13
_LISTED_AT_ONCE = 48
"""Tensors that one kernel of a foreach optimizer works on, by the space for its arguments: between 30 and 110."""
# of tiles of 16 to 128 channels, 64 was best for RegNets and ResNeXts (docs/decisions/0029)
_WIDTH = 64
"""Channels of a group for which the shares of grouped convolutions in half types are given."""
_WIDEST = 320
"""Channels of a group from which on it is multiplied as fast as a convolution of one group."""
_READ_AGAIN: dict[str, int] = {
    "native_batch_norm": 0,
    "_native_batch_norm_legit": 0,
    "_batch_norm_with_update": 0,
    "cudnn_batch_norm": 0,
    "native_batch_norm_backward": 1,
    "cudnn_batch_norm_backward": 1,
    "native_layer_norm_backward": 1,
    "native_group_norm": 0,
    "native_group_norm_backward": 1,
    "convolution_backward": 0,
    "batchnorm_backward": 2,
}
"""Operators of two kernels that both read some of their arguments (batch norm: for the moments, then for the result),
up to this place among the arguments."""


_LIKE = frozenset(
    (
        *("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"),
        *("rand_like", "randn_like", "randint_like"),
    )
)
"""Operators that make a tensor like their first argument, whose values they do not read."""

_COPIES = ("copy_", "_to_copy")
_RECURRENT = (recurrent.FORWARD, recurrent.BACKWARD)
_CONVERTING = {"_to_copy": 0, "copy_": 1}
"""Operators that convert an argument, by its place."""
_GRADIENTS = {(True, False): "of the input", (False, True): "of the weight"}
_REDUCING = frozenset(("sum", "mean", "amax", "amin", "aminmax", "linalg_vector_norm"))


@dataclass(frozen=True)
class OperatorWork:
    """What an operator does.

    Attributes:
        name: Of the operator, without its namespace and overload.
        kind: Which efficiency counts; None for a view and others that move nothing.
        flops: Floating-point operations.
        precision: In which these are computed.
        moved: Bytes read and written.
        copied: Bytes read and written by copies into the memory format of tensor cores and back.
        launches: Kernels.
        listed: Tensors in lists.
        has_bfloat16: Whether it computes in bfloat16, which devices of before Ampere have no units for.
        is_known: Whether its kind is known; one that is not is counted by its bytes, as elementwise.
        reached: Which part of its kind's share of the peak rate its shape reaches.
        form: What decides its time besides its bytes: from which type to which it converts, along what it reduces, of
            what alone it is the gradient.
        has_channels_last: Whether it is a convolution of tensors with their channels last.
        collective: What is exchanged with other processes, where that is all that it does.
    """

    name: str
    kind: Kind | None = None
    flops: int = 0
    precision: Precision = "fp32"
    moved: int = 0
    copied: int = 0
    launches: int = 0
    listed: int = 0
    has_bfloat16: bool = False
    is_known: bool = True
    reached: float = 1.0
    form: str = ""
    has_channels_last: bool = False
    collective: Collective | None = None

    @property
    def label(self) -> str:
        """Under which name the operator is measured."""
        return self.labels[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the operator, the most exact first: convolutions with groups are others than those without."""
        kind = (self.kind or "").removeprefix("uneven ")
        is_grouped = kind in ("grouped convolution", "depthwise convolution")
        name = self.name.replace("convolution", kind) if is_grouped else self.name
        called = f"{name} {self.form}" if self.form else name
        usual = (called, self.name)
        return (f"{called} with channels last", *usual) if self.has_channels_last else usual


def idle(func: Any) -> bool:
    """Return whether an operator moves nothing, whatever its arguments."""
    name = func._schema.name.partition("::")[2]
    return name in IGNORED or name in NOTHING or func.is_view


def idle_work(func: Any) -> OperatorWork | None:
    """Return what is counted of an operator that moves nothing; None for one that no device runs."""
    name = func._schema.name.partition("::")[2]
    return None if name in IGNORED else OperatorWork(name)


def work_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> OperatorWork:
    """Return what an operator did that returned ``result``."""
    name = func._schema.name.partition("::")[2]
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    lists = [value for value in args if isinstance(value, list | tuple)]
    listed = sum(len(value) for value in lists if all(isinstance(each, Tensor) for each in value))
    if name.startswith("_foreach_") and all(tensor.dim() == 0 for tensor in tensors):
        return OperatorWork(name, listed=listed)  # step counters of an optimizer, which are in host memory
    crosses = name in _COPIES and len(set(map(is_on_card, (*tensors, result)))) > 1
    kind = "host copy" if crosses else kind_of(func, name, args)
    # multi_tensor_apply launches one kernel for as many tensors as the space for its arguments holds
    launches = max(1, math.ceil(max(map(len, lists)) / _LISTED_AT_ONCE)) if listed else 1
    launches = recurrent.kernels(func, args) if func._overloadpacket in _RECURRENT else launches
    precision = _precision(kind, tensors)
    is_convolution = kind is not None and kind.endswith("convolution")
    last = is_convolution and any(map(has_channels_last, _convolved(args, result)[:2]))
    copied = [] if last else _copied(kind, precision, args, result)
    return OperatorWork(
        name,
        kind or "elementwise",
        flops=_flops(func, args, kwargs, result),
        precision=precision,
        moved=_moved(func, name, args, tensors, result),
        copied=2 * sum(map(_bytes, copied)),
        launches=launches + _has_two_kernels(name, args) + len(copied),
        listed=listed,
        has_bfloat16=any(tensor.dtype == torch.bfloat16 for tensor in tensors),
        is_known=kind is not None,
        reached=_reached(kind, precision, args, result),
        form=_form(name, args, result),
        has_channels_last=last,
    )


def exchange(collective: Collective) -> OperatorWork:
    """Return what a collective does."""
    return OperatorWork(collective.kind, "communication", launches=1, collective=collective)


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    if func is torch.ops.aten.convolution.default:
        return _of_convolution(*_convolved(args, result), transposed=args[6])
    if func._overloadpacket in _RECURRENT:
        return recurrent.flops(func, args)
    if func is torch.ops.aten.convolution_backward.default:
        wanted: list[bool] = args[10]
        # each gradient multiplies as much as the forward pass; the bias's is a sum, which counts no products
        return _of_convolution(*_convolved(args, result), transposed=args[7]) * sum(wanted[:2])
    # torch knows the operations of some operators that work in place by the others alone
    out_of_place = getattr(torch.ops.aten, func._schema.name.partition("::")[2].rstrip("_"), None)
    count = flop_registry.get(func._overloadpacket) or flop_registry.get(out_of_place)
    if count is None:
        return 0
    total = int(count(*args, **kwargs, out_val=result))
    # kernels of attention skip the blocks of scores that a causal mask hides
    return total // 2 if _argument(func, "is_causal", args, kwargs) else total


def _convolved(args: tuple[Any, ...], result: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, weight and output of a convolution, or input, weight and the output's gradient of its gradients."""
    return (args[1], args[2], args[0]) if isinstance(result, tuple) else (args[0], args[1], result)


def _of_convolution(x: Tensor, weight: Tensor, output: Tensor, *, transposed: bool) -> int:
    """Return the operations of a convolution, or of either of its gradients, which torch counts wrong with groups."""
    return 2 * (x if transposed else output).numel() * math.prod(weight.shape[1:])


def _copied(kind: Kind | None, precision: Precision, args: tuple[Any, ...], result: Any) -> list[Tensor]:
    """Return the tensors that cuDNN copies for a convolution: tensor cores read half types with channels last alone.

    In the default memory format it copies what a convolution reads and writes, for each gradient anew.
    """
    if precision != "half" or kind not in ("convolution", "grouped convolution"):
        return []
    x, weight, output = _convolved(args, result)
    if not isinstance(result, tuple):
        return [x, weight, output]
    of_input, of_weight = result[:2]
    found = [] if of_input is None else [output, weight, of_input]
    return found if of_weight is None else [*found, output, x, of_weight]


def _reached(kind: Kind | None, precision: Precision, args: tuple[Any, ...], result: Any) -> float:
    """Return the rate of a grouped convolution in a half type over that with groups of 64 channels and stride 1.

    The time of gradients of uneven groups scales with input positions, whatever the stride, and with
    ``group width ** 1.5``. Other convolutions multiply wider groups faster, up to the rate of a single group.
    """
    if precision != "half" or kind not in ("grouped convolution", "uneven grouped convolution"):
        return 1.0
    x, weight, output = _convolved(args, result)
    width = weight.shape[1]
    if kind == "grouped convolution":
        return max(1.0, min(width, _WIDEST) / _WIDTH)
    # fitted on RegNets of timm's tables (docs/decisions/0028)
    passed: float = min(1.0, math.prod(output.shape[2:]) / math.prod(x.shape[2:]))
    return passed * math.sqrt(width / _WIDTH)


def _form(name: str, args: tuple[Any, ...], result: Any) -> str:
    """Return the types that an operator converts from and to, what it reduces, or of what alone it is the gradient."""
    if name == "convolution_backward":
        return _GRADIENTS.get((bool(args[10][0]), bool(args[10][1])), "")
    if name in _CONVERTING:
        given, target = args[_CONVERTING[name]], result.dtype
        source = given.dtype if isinstance(given, Tensor) else target  # a number has no type to convert
        return "" if source == target else f"{_called(source)} to {_called(target)}"
    if name not in _REDUCING:
        return ""
    whole, reduced = args[0], result[0] if isinstance(result, tuple) else result
    if reduced.numel() == 1 or not whole.dim():
        return ""
    return "of columns" if reduced.shape[-1:] == whole.shape[-1:] else "of rows"


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = next((at for at, each in enumerate(func._schema.arguments) if each.name == name), len(args))
    return args[place] if place < len(args) else None


def _precision(kind: Kind | None, tensors: Iterable[Tensor]) -> Precision:
    """Return in which type products are computed.

    PyTorch's default is TF32 for convolutions and not for matrices; depthwise ones are no work for tensor cores.
    """
    kinds = {tensor.dtype for tensor in tensors}
    if any(dtype.itemsize == 1 and dtype.is_floating_point for dtype in kinds):
        return "fp8"
    if kinds & set(_HALVES):
        return "half"
    return "tf32" if kind in ("convolution", "grouped convolution") else "fp32"


def _moved(func: Any, name: str, args: tuple[Any, ...], tensors: list[Tensor], result: Any) -> int:
    """Return the bytes read and written; what is changed in place is both."""
    if name == "all_gather_copy_in":  # the rest of the buffer is for others to write
        return 2 * sum(map(_bytes, args[0]))
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    total = sum(map(_bytes, tensors)) + sum(map(_bytes, results))
    # operators that work in place on lists return nothing, and relu_mask_ returns the mask: what they write is added
    total += sum(_bytes(each) for each in written(func, args) if not any(each is other for other in results))
    if name in ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"):
        total -= _bytes(args[0])  # it is written, and not read
    if name in ("embedding", "gather", "index", "index_select"):
        total -= max(0, _bytes(args[0]) - _bytes(result))  # only what is taken is read
    if name in _LIKE:
        total -= _bytes(args[0])  # it gives type and device, and no values
    if _has_two_kernels(name, args):
        total += sum(_bytes(each) for each in args[: _READ_AGAIN[name] + 1] if isinstance(each, Tensor))
    return total


def _has_two_kernels(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether an operator is one of ``_READ_AGAIN``; of a convolution, if both gradients are wanted."""
    return name in _READ_AGAIN and (name != "convolution_backward" or all(args[10][:2]))


def written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors of arguments that an operator writes."""
    changed = [
        value
        for each, value in zip(func._schema.arguments, args, strict=False)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor: what is repeated in it is read once."""
    # expanded dimensions have a stride of 0
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return math.prod(sizes) * tensor.element_size()
