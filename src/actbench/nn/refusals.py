"""What schemes refuse: to be compiled, to be differentiated twice, to share packed gradients among processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from actbench.errors import ConversionError
from actbench.nn.forwardwrapper import ReboundForward

_eval_frame: Any = torch._C._dynamo.eval_frame


def refuse_compiling(what: str, why: str) -> None:
    """Raise a ConversionError under ``torch.compile``, saying what cannot be compiled and, at the end, why.

    An exception while it traces only makes it run the forward uncompiled, and compile what that calls. So it is asked
    too whether it waits for the frames that are called from here.

    Raises:
        ConversionError: This runs under ``torch.compile``.
    """
    if torch.compiler.is_compiling() or callable(_eval_frame.get_eval_frame_callback()):
        raise ConversionError(
            f"{what} cannot be compiled: {why}; use it without torch.compile, or fewbit or randomized with it"
        )


def refuse_compiled(module: nn.Module, what: str, why: str) -> None:
    """Raise a ConversionError for a model that is compiled or holds a part that is, at once and not as it first runs.

    Raises:
        ConversionError: It is.
    """
    for path, part in module.named_modules():
        if is_compiled(part):
            found = f"{path!r} of this {type(module).__name__}" if path else f"this {_inside(module)}"
            raise ConversionError(
                f"{found} is compiled by torch.compile, and {what} cannot be: {why}; convert the model without "
                "torch.compile, or take fewbit or randomized with it"
            )


def uncompilable_in(module: nn.Module) -> tuple[str, str] | None:
    """Return what ``torch.compile`` cannot compile of a converted model, and why; None where nothing says so."""
    for part in module.modules():
        for changed in (part, *ReboundForward.all_of(part), *part._forward_hooks.values()):
            found: tuple[str, str] | None = getattr(changed, "uncompilable", None)
            if found is not None:
                return found
    return None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what ``torch.compile`` returns, or was compiled in place by ``module.compile()``."""
    frame = sys.modules.get("torch._dynamo.eval_frame")  # where nobody has imported the compiler, nothing is compiled
    returned = frame is not None and isinstance(module, frame.OptimizedModule)
    return returned or vars(module).get("_compiled_call_impl") is not None


def _inside(module: nn.Module) -> str:
    return type(getattr(module, "_orig_mod", module)).__name__


Gradients = tuple[Tensor | None, ...]


def refuse_second_order(what: str = "a layer that keeps less than its input for backward") -> None:
    """Raise a RuntimeError in a backward pass that makes a graph of itself (``create_graph=True``).

    At once, and not when that graph is differentiated: autograd passes by a node that would raise then, where it leads
    to none of the tensors that a gradient is asked for (``torch.autograd.grad``), and what was packed leads to none.

    Raises:
        RuntimeError: The backward pass makes a graph.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a second derivative was asked of {what} (create_graph=True); "
            "take second derivatives of the unconverted model"
        )


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Make the backward of an autograd function raise a RuntimeError where a second derivative may be taken of it.

    torch's ``once_differentiable`` raises when its result is differentiated, and only where the incoming gradient needs
    a gradient; where that is a constant, as at the end of a model, the derivative by the input is lost without a word.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor) -> Gradients:
        refuse_second_order()
        return backward(ctx, *gradients)

    return refusing


def saved_output(ctx: Any, kept: str, otherwise: str) -> tuple[Tensor, ...]:
    """Return the saved tensors of a function that saved its output, which the model may change in place.

    Args:
        ctx: Of the function.
        kept: What is kept by whom, as the beginning of a sentence that goes on ``modified by an inplace operation``.
        otherwise: What to do but to leave that operation out.

    Raises:
        RuntimeError: A saved tensor was changed in place since.
    """
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"{kept} modified by an inplace operation before the backward pass; let that operation make a new tensor, "
            f"or {otherwise} ({error})"
        ) from error


class NotInParallel:
    """A forward pre-hook that raises where ``DistributedDataParallel`` runs a model with ``what``, and says why."""

    def __init__(self, what: str, why: str) -> None:
        self.what, self.why = what, why

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look for the wrapper around the model that runs.

        Raises:
            ConversionError: There is one.
        """
        if distributed.is_available() and DistributedDataParallel._active_ddp_module is not None:
            raise ConversionError(f"DistributedDataParallel does not go with {self.what}: {self.why}")


def refuse_unshared(module: nn.Module, who: str) -> None:
    """Raise a ConversionError, told by ``who``, for a model with what does not go with several processes.

    Raises:
        ConversionError: It has a :class:`NotInParallel` hook.
    """
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, NotInParallel):
            raise ConversionError(f"{who} does not go with {hook.what}: {hook.why}")


def refuse_sharded(module: nn.Module, what: str, why: str) -> None:
    """Raise a ConversionError where FSDP has sharded the parameters of a model with ``what``, and say why.

    Raises:
        ConversionError: It has.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # imports as much as all of torch

    if any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in module.modules()):
        raise ConversionError(f"FSDP does not go with {what}: {why}")
