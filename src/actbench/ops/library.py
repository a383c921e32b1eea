"""The one operator namespace of the package, ``torch.ops.actbench``.

Operators are made with ``define`` and ``impl``: the decorators cost two to four times as much per call, and that cost
would be part of every figure that is published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

library = torch.library.Library("actbench", "DEF")  # type: ignore[no-untyped-call]  # registrations live as long

EVERYWHERE = "CompositeExplicitAutograd"
"""The dispatch key of what runs on any device."""

HOST_NUMBER = (torch.Tag.cudagraph_unsafe,)
"""The tags of what reads a number on the host: a replayed CUDA graph would go on with that of its capture."""

RANDOM = (torch.Tag.nondeterministic_seeded, *HOST_NUMBER)
"""The tags of what draws a seed: no two calls may become one. They do not keep a compiler from calling again in the
backward pass, so what the backward pass needs of a draw must be results of one operator."""


def define(
    schema: str,
    implementation: Callable[..., object] | Mapping[str, Callable[..., object]],
    fake: Callable[..., object],
    tags: Sequence[torch.Tag] = (torch.Tag.pt2_compliant_tag,),
) -> None:
    """Make an operator, which is run on tensors of the strides that it was traced with.

    Without the tag for it a compiler may lay out what convolutions give otherwise, and kernels count elements as they
    lie. Its passes may still ask the fake about other strides, so that has to answer as for a contiguous tensor.

    Args:
        schema: Its name and what it takes and gives, in torch's notation.
        implementation: What computes it on CPU and CUDA, or a function for each dispatch key: ``CPU``, ``CUDA``,
            :data:`EVERYWHERE`.
        fake: Gives the shapes and types for fake tensors.
        tags: What torch's compilers may take for granted.
    """
    library.define(schema, tags=(*tags, torch.Tag.needs_exact_strides))  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    by_key = implementation if isinstance(implementation, Mapping) else dict.fromkeys(("CPU", "CUDA"), implementation)
    for key, function in by_key.items():
        library.impl(name, function, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"actbench::{name}", fake, lib=library)


_internals: Any = torch._C
_compiling = torch.compiler.is_dynamo_compiling
_modes, _transforms = _internals._len_torch_dispatch_stack, _internals._functorch.peek_interpreter_stack
_batched = _internals._functorch.is_legacy_batchedtensor
_left_over = _internals._functorch.is_dead_tensor_wrapper
_tracer = _internals._TorchDispatchModeKey.PROXY


def traced() -> bool:
    """Return whether this runs for ``torch.compile`` or another tracer to make a graph of it."""
    return torch.compiler.is_compiling() or _internals._get_dispatch_mode(_tracer) is not None


def direct(tensor: Tensor) -> bool:
    """Return whether an operator on a tensor may be computed without the dispatcher, which costs 5 microseconds.

    That is on the CPU, where no one would see it go by (no tracer, no mode, no transform, no subclass), and where the
    tensor's memory holds its values. Exporters trace by modes.
    """
    if _compiling():
        return False
    plain = type(tensor) is Tensor and tensor.is_cpu and not _modes() and _transforms() is None
    return plain and not (tensor.is_neg() or tensor._is_zerotensor() or _batched(tensor) or _left_over(tensor))
