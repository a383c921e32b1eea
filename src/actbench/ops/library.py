"""The one operator namespace of the package, ``torch.ops.actbench``.

Operators are made with ``define`` and ``impl`` of torch's library: the decorators of ``torch.library`` cost two to four
times as much per call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from actbench.ops.cpu import LEAST_BYTES, advise

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Callable[..., Any]

library = torch.library.Library("actbench", "DEF")  # type: ignore[no-untyped-call]  # registrations live as long

EVERYWHERE = "CompositeExplicitAutograd"
"""The dispatch key of what runs on any device."""

HOST_NUMBER = (torch.Tag.cudagraph_unsafe,)
"""The tags of what reads a number on the host: a replayed CUDA graph would go on with that of its capture."""

RANDOM = (torch.Tag.nondeterministic_seeded, *HOST_NUMBER)
"""The tags of what draws a seed: no two calls may become one. They do not keep a compiler from calling again in the
backward pass, so what the backward pass needs of a draw must be results of one operator."""


class Kernels(NamedTuple):
    """What computes an operator whose results are allocated before: each takes these, then the operator's arguments.

    Attributes:
        reference: In float64, for which there are no kernels, on any device.
    """

    cpu: Implementation
    cuda: Implementation
    reference: Implementation | None = None


def copied(function: Implementation, results: int = 1) -> Implementation:
    """Return what writes the results of a function over those that are given before its arguments."""

    def fill(*arguments: Any) -> None:
        found = function(*arguments[results:])
        for result, value in zip(arguments[:results], found if results > 1 else (found,), strict=True):
            result.copy_(value)

    return fill


def define(
    schema: str,
    implementation: Kernels | Mapping[str, Implementation],
    *,
    decided_by: str | None = None,
    dispatched: bool = False,
    tags: Sequence[torch.Tag] = (torch.Tag.pt2_compliant_tag,),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an operator of a function that checks its arguments and allocates its results, and return how to call it.

    That function is the operator's contract, and what runs on fake tensors. What is returned goes to the kernels where
    :func:`direct` allows it, and through torch's dispatcher otherwise.

    An operator is run on tensors of the strides that it was traced with. Without the tag for it a compiler may lay out
    what convolutions give otherwise, and kernels count elements as they lie. Its passes may still ask the fake about
    other strides, so that has to answer as for a contiguous tensor.

    Args:
        schema: Its name and what it takes and gives, in torch's notation.
        implementation: Kernels that fill what the contract allocates; or for each dispatch key (``CPU``, ``CUDA``,
            :data:`EVERYWHERE`) a function that does everything. Torch's operators in it are hidden from autograd, so it
            always goes through the dispatcher.
        decided_by: The argument whose device and type decide what computes; the first tensor if not given.
        dispatched: Let kernels go through the dispatcher too: it tells autograd of a tensor that is changed in place.
        tags: What torch's compilers may take for granted.
    """
    name, _, taken = schema.partition(" -> ")[0].rstrip(")").partition("(")
    parameters = [parameter.rsplit(" ", 1) for parameter in taken.split(", ") if parameter]
    tensors = [place for place, (kind, _) in enumerate(parameters) if kind.startswith("Tensor")]
    names = [called for _, called in parameters]
    decider = names.index(decided_by) if decided_by else tensors[0] if tensors else -1

    def made(contract: Callable[P, R]) -> Callable[P, R]:
        library.define(schema, tags=(*tags, torch.Tag.needs_exact_strides))  # type: ignore[no-untyped-call]
        by_key = _filling(contract, implementation, decider) if isinstance(implementation, Kernels) else implementation
        for key, function in by_key.items():
            library.impl(name, function, key)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"actbench::{name}", contract, lib=library)
        operator = getattr(torch.ops.actbench, name).default
        here = by_key["CPU"] if isinstance(implementation, Kernels) and not dispatched else None
        others = [place for place in tensors if place != decider]
        return functools.wraps(contract)(_callable(contract, names, operator, here, decider, others))

    return made


def _filling(contract: Callable[..., object], kernels: Kernels, decider: int) -> dict[str, Implementation]:
    """Return, for each device, what checks the arguments, allocates the results and has them written."""

    def filled_by(kernel: Implementation, on_cpu: bool) -> Implementation:
        def run(*arguments: Any) -> Any:
            made = contract(*arguments)
            results: Any = made if type(made) is tuple else () if made is None else (made,)
            in_double = arguments[decider].dtype == torch.float64 or (results and results[0].dtype == torch.float64)
            if on_cpu:
                for result in results:
                    if result.nbytes >= LEAST_BYTES:
                        advise(result)
            fill = kernels.reference if in_double and kernels.reference is not None else kernel
            fill(*results, *arguments)
            return made

        return run

    return {"CPU": filled_by(kernels.cpu, True), "CUDA": filled_by(kernels.cuda, False)}


def _callable(
    contract: Callable[..., object],
    names: list[str],
    operator: Callable[..., Any],
    here: Implementation | None,
    decider: int,
    others: list[int],
) -> Callable[..., Any]:
    """Return what gives all arguments in order to ``here`` where that is allowed, and to ``operator`` elsewhere."""
    parameters = inspect.signature(contract).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    count = len(names)

    def call(*arguments: Any, **named: Any) -> Any:
        if named or len(arguments) != count:
            given, rest = {**defaults, **named}, names[len(arguments) :]
            if any(name not in rest for name in named) or any(name not in given for name in rest):
                contract(*arguments, **named)  # raises what Python raises
            arguments = (*arguments, *[given[name] for name in rest])
        if here is not None and direct(arguments[decider]):
            for place in others:
                if type(arguments[place]) is not Tensor:
                    return operator(*arguments)
            return here(*arguments)
        return operator(*arguments)

    return call


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

    That is on the CPU, where no one would see it go by (no tracer, mode, transform or subclass), and where the tensor's
    memory holds its values. Exporters trace by modes.
    """
    if _compiling():
        return False
    plain = type(tensor) is Tensor and tensor.is_cpu and not _modes() and _transforms() is None
    return plain and not (tensor.is_neg() or tensor._is_zerotensor() or _batched(tensor) or _left_over(tensor))
