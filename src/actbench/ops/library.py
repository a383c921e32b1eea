"""The one operator namespace of the package, ``torch.ops.actbench``, and checks of operators' arguments.

Operators are made with ``define`` and ``impl`` of torch's library: the decorators of ``torch.library`` cost two to four
times as much per call.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Callable[..., Any]

library = torch.library.Library("actbench", "DEF")  # type: ignore[no-untyped-call]  # registrations live as long

EVERYWHERE = "CompositeExplicitAutograd"
"""The dispatch key of an implementation that runs on any device."""

RANDOM = (torch.Tag.nondeterministic_seeded,)
"""The tags of an operator that draws a seed: a compiler must not merge two calls. It may still call again in the
backward pass, so all that the backward pass needs of a draw must be results of one operator.
"""


class Kernels(NamedTuple):
    """Functions that fill the allocated results of an operator: each takes the results, then the operator's arguments.

    Attributes:
        reference: Fills float64 results, for which there are no kernels, on any device.
    """

    cpu: Implementation
    cuda: Implementation
    reference: Implementation | None = None


def copied(function: Implementation, results: int = 1) -> Implementation:
    """Return a function that takes results, then arguments, and copies what ``function`` returns into the results."""

    def fill(*arguments: Any) -> None:
        found = function(*arguments[results:])
        for result, value in zip(arguments[:results], found if results > 1 else (found,), strict=True):
            result.copy_(value)

    return fill


def define(
    schema: str,
    implementation: Kernels | Mapping[str, Implementation],
    *,
    tags: Sequence[torch.Tag] = (torch.Tag.pt2_compliant_tag,),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an operator of a function that checks arguments and allocates results; return a function that calls it.

    The decorated function is the operator's contract, and runs on fake tensors.

    By a tag, an operator gets tensors with the strides of its trace. Without the tag a compiler may change the layout
    of a convolution's output, and kernels count elements in memory order. A compiler's passes may still call the
    contract with other strides, so it must answer as for a contiguous tensor.

    Args:
        schema: Name, arguments and results of the operator, in torch's notation.
        implementation: Kernels that fill the results that the contract allocates, or for each dispatch key (``CPU``,
            ``CUDA``, :data:`EVERYWHERE`) a function that does everything.
        tags: What torch's compilers may rely on.
    """
    name = schema.partition("(")[0]

    def made(contract: Callable[P, R]) -> Callable[P, R]:
        # see docs/decisions/0006
        library.define(schema, tags=(*tags, torch.Tag.needs_exact_strides))  # type: ignore[no-untyped-call]
        by_key = _filling(contract, implementation) if isinstance(implementation, Kernels) else implementation
        for key, function in by_key.items():
            library.impl(name, function, key)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"actbench::{name}", contract, lib=library)
        operator: Any = getattr(torch.ops.actbench, name).default

        parameters = enumerate(inspect.signature(contract).parameters.values())
        defaults = {each.name: (place, each.default) for place, each in parameters if each.default is not each.empty}
        required = len(inspect.signature(contract).parameters) - len(defaults)
        last = tuple(value for _, value in defaults.values())
        kinds = [str(argument.type) for argument in operator._schema.arguments]
        # which arguments are tensors; none if the dispatcher must look into lists or for tensors that may be missing
        in_lists = any("Tensor" in kind and kind != "Tensor" for kind in kinds)
        tensors = () if in_lists else tuple(place for place, kind in enumerate(kinds) if kind == "Tensor")
        here = {key: by_key.get(EVERYWHERE) or by_key[key] for key in ("CPU", "CUDA")} if tensors else {}
        full = len(defaults) + required

        @functools.wraps(contract)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            if named or len(arguments) < required:
                left = {name: value for name, (place, value) in defaults.items() if place >= len(arguments)}
                return operator(*arguments, **(left | named))  # type: ignore[no-any-return]
            # parameters with defaults stand last, so that the missing ones are the end of the defaults
            given: Any = arguments if len(arguments) == full else arguments + last[len(arguments) - required :]
            if not here or torch.compiler.is_compiling() or is_watched():
                return operator(*given)  # type: ignore[no-any-return]
            key = _plain_key([given[place] for place in tensors])
            return (operator if key is None else here[key])(*given)  # type: ignore[no-any-return]

        return call

    return made


# Torch's dispatcher takes as long as all the rest that an operator does with a small tensor. It finds nothing to do
# between the call and the kernel if all tensors are plain, no gradient is recorded, and nothing looks on.

_internals: Any = torch._C
_modes_in_use: Callable[[], int] = _internals._len_torch_dispatch_stack
_transform: Callable[[], object] = _internals._functorch.peek_interpreter_stack
_is_profiled: Callable[[], bool] = _internals._autograd._profiler_enabled


def is_watched() -> bool:
    """Return whether a mode, as of fake tensors and tracers, a transform of functions, or a profiler sees operators.

    If not, a kernel that gets addresses may be called at once on tensors whose memory holds their values.
    """
    return _modes_in_use() > 0 or _transform() is not None or _is_profiled()


def holds_its_values(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor holds its values, where nothing sees operators (:func:`is_watched`).

    Torch's set of dispatch keys tells the same, but is an object that takes longer to make than all of this.
    """
    return (
        type(tensor) in _CLASSES
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)  # a meta tensor has a storage without memory
        and _has_storage(tensor)  # not so in a batch of gradients, which is of class Tensor
        and not (
            tensor.is_nested
            or tensor.is_neg()
            or tensor.is_conj()
            or tensor._is_zerotensor()
            or tensor.is_quantized
            or _is_functional(tensor)
        )
    )


_CLASSES = (Tensor, torch.nn.Parameter)
_has_storage: Callable[[Tensor], bool] = _internals._has_storage
_is_functional: Callable[[Tensor], bool] = vars(torch)["_is_functional_tensor"]


def _plain_key(tensors: Sequence[Any]) -> str | None:
    """Return the device that the first of these tensors is on, as a dispatch key; None if one of them is not plain."""
    for tensor in tensors:
        if not holds_its_values(tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
            return None
    first = tensors[0]
    return "CPU" if first.is_cpu else "CUDA" if first.is_cuda else None


def _filling(contract: Callable[..., object], kernels: Kernels) -> dict[str, Implementation]:
    """Return, for each device, a function that checks arguments, allocates results and calls the kernel."""

    def filled_by(kernel: Implementation, on_cpu: bool) -> Implementation:
        def run(*arguments: Any) -> Any:
            made = contract(*arguments)
            results: Any = made if type(made) is tuple else () if made is None else (made,)
            fill = kernel
            for each in results:
                if each.dtype is torch.float64:
                    fill = kernels.reference or kernel
                if on_cpu and each.nbytes >= LEAST_BYTES:
                    advise(each)
            for each in arguments:
                if isinstance(each, Tensor) and each.dtype is torch.float64:
                    fill = kernels.reference or kernel
            fill(*results, *arguments)
            return made

        return run

    return {"CPU": filled_by(kernels.cpu, True), "CUDA": filled_by(kernels.cuda, False)}


# glibc's DEFAULT_MMAP_THRESHOLD_MAX: its threshold grows with what is freed, but no further (man mallopt)
LEAST_BYTES = 32 * 1024**2
"""From this size on the C library maps each allocation separately, so the advice ends with the tensor."""


def advise(tensor: Tensor) -> bool:
    """Ask for huge pages under a tensor and return whether the system took the advice.

    A fresh tensor of 48 MiB costs 12,288 page faults, 14 ms on a machine that writes it in 2 ms: more than any kernel
    computes. Pages of 2 MiB, which Linux gives on request, remove nearly all of these faults; torch requests them for
    its own allocations with ``THP_MEM_ALLOC_ENABLE=1``. Without such pages nothing changes.
    """
    call = _madvise()
    if call is None:
        return False
    # madvise takes whole pages, and the first and the last may be shared with others
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    return call(start, length, mmap.MADV_HUGEPAGE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's madvise, or None on systems without huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    # None is the process itself, which holds the C library
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call.restype = ctypes.c_int
    return call


_PROXY, _FAKE = (getattr(_internals._TorchDispatchModeKey, name) for name in ("PROXY", "FAKE"))


def traced() -> bool:
    """Return whether ``torch.compile`` or another tracer records a graph of this call."""
    return torch.compiler.is_compiling() or (_modes_in_use() > 0 and _internals._get_dispatch_mode(_PROXY) is not None)


def faked() -> bool:
    """Return whether operators make fake tensors here."""
    return _modes_in_use() > 0 and _internals._get_dispatch_mode(_FAKE) is not None


# Checks of arguments that a kernel would misread or read past; plain ``if``s, since every call pays for them.

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def wide(tensor: Tensor) -> Tensor:
    """Return a float tensor in the type that operators compute in: float64 for float64, else float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def empty_contiguous(like: Tensor) -> Tensor:
    """Return an empty contiguous tensor of the shape, type and device of another."""
    return torch.empty_like(like if like.is_contiguous() else like.contiguous())


def check_contiguous(tensor: Tensor) -> None:
    """Raise a ValueError unless the tensor is contiguous and of a float type that the operators take.

    A fake tensor may have other strides: a compiler's passes try layouts that no kernel will get.
    """
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{tensor.dtype} is not one of {DTYPES}")
    if not tensor.is_contiguous() and not isinstance(tensor, FakeTensor):
        raise ValueError(f"the tensor must be contiguous, found strides {tensor.stride()}")


def check_bits(bits: int) -> None:
    """Raise a ValueError unless ``bits`` is from 1 to 8."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be from 1 to 8, found {bits}")


def check_vector(vector: Tensor, dtype: torch.dtype, device: torch.device, what: str) -> None:
    """Raise a ValueError, which names ``what``, unless ``vector`` is contiguous and of this type and device."""
    if vector.dtype != dtype or vector.dim() != 1 or not vector.is_contiguous() or vector.device != device:
        found = f"{vector.dtype} {tuple(vector.shape)} on {vector.device}"
        raise ValueError(f"{what} must be a contiguous {dtype} vector on {device}, found {found}")


def check_table(table: Tensor, tensor: Tensor, bits: int, entries: int, what: str) -> None:
    """Raise a ValueError unless a table of bounds or levels has these entries and fits the tensor."""
    if table.dtype != torch.float32 or table.dim() != 1 or not table.is_contiguous():
        raise ValueError(f"{what} must be a contiguous float32 vector, found {table.dtype} {tuple(table.shape)}")
    if table.numel() != entries:
        raise ValueError(f"{bits} bits take {entries} {what}, found {table.numel()}")
    if table.device != tensor.device:
        raise ValueError(f"{what} on {table.device}, the tensor on {tensor.device}")
