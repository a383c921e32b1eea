"""What schemes refuse: layers without a shape, compilation, second derivatives, gradients shared among processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from actbench.errors import ConversionError, ModelError, check_argument
from actbench.model.declared.schemes import compilable
from actbench.packing.forwardwrapper import ReboundForward

_eval_frame: Any = torch._C._dynamo.eval_frame
_compiler: Any = torch.compiler

_DEEPEST = 200  # torch walks through modules by recursion, and so does this package


def check_module(module: object, what: str) -> None:
    """Check that an argument of ``what`` is a module, and that walks through the modules in it end.

    Raises:
        ArgumentError: It is not a module.
        ModelError: A module holds itself, or modules are nested deeper than torch can walk.
    """
    check_argument(module, nn.Module, what, "a torch.nn.Module")
    assert isinstance(module, nn.Module)
    inside, paths, held = [iter(module.named_children())], [""], [id(module)]
    done: set[int] = set()
    while inside:
        name, child = next(inside[-1], ("", None))
        if child is None:
            inside.pop()
            paths.pop()
            done.add(held.pop())
            continue
        path = f"{paths[-1]}.{name}".lstrip(".")
        if id(child) in held:
            raise ModelError(f"{path} of this {type(module).__name__} contains itself: torch cannot walk through it")
        if len(held) >= _DEEPEST:
            where = f"{type(module).__name__} nests modules more than {_DEEPEST} deep"
            raise ModelError(f"this {where}: build it of fewer modules inside each other, which torch can walk")
        # a module in many places is walked through once: else the time would grow as a power of two
        if id(child) not in done:
            inside.append(iter(child.named_children()))
            paths.append(path)
            held.append(id(child))


def refuse_lazy(module: nn.Module) -> None:
    """Raise a ModelError if a layer waits for its first batch to know the shape of its parameters or buffers."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        layer = type(module.get_submodule(lazy.rpartition(".")[0])).__name__
        raise ModelError(
            f"{lazy} has no shape, as {layer} waits for its first batch: call the model once on a batch where it is "
            "built, under torch.no_grad()"
        )


_COMPILABLE = " or ".join(compilable())
"""Schemes that compile: read now, since torch.compile warns of caches that it traces through."""


def refuse_compiling(what: str, why: str, otherwise: str = "") -> None:
    """Raise a ConversionError under ``torch.compile`` or ``torch.export``: what cannot be compiled, why, and what can.

    An exception during tracing would only make ``torch.compile`` run the forward uncompiled, and compile what the
    forward calls. So this also checks whether the compiler waits for frames that are called from here.
    """
    refuse_exporting(what, why)
    if is_waited_for():
        instead = otherwise or _COMPILABLE
        raise ConversionError(
            f"{what} cannot be compiled: {why}; leave torch.compile out, or use {instead} with torch.compile"
        )


def is_waited_for() -> bool:
    """Return whether a compiler reads this call, or waits for the frames that are called from here."""
    return torch.compiler.is_compiling() or callable(_eval_frame.get_eval_frame_callback())


def is_read() -> bool:
    """Return whether a compiler or ``torch.export`` reads this call, or waits for the frames that are called from here.

    If not, nothing is to be refused: to ask this first saves the questions what would be.
    """
    return is_waited_for() or is_exporting()


def is_exporting() -> bool:
    """Return whether ``torch.export`` reads this call; torch 2.11 says so of whatever it compiles."""
    return bool(_compiler._is_exporting_flag)


def refuse_exporting(what: str, why: str) -> None:
    """Raise a ConversionError under ``torch.export`` that says what cannot be exported and why."""
    if is_exporting():
        raise ConversionError(
            f"{what} cannot be exported: {why}; undo the conversion first: actbench.conversion_of(model).undo(), or "
            "export it under torch.no_grad()"
        )


OWN_BACKWARD = ("a converted layer", "it has a backward pass of its own, which an exported graph loses")
"""What cannot be exported, and why."""


def refuse_compiled(module: nn.Module, what: str, why: str) -> None:
    """Raise a ConversionError at once, not at the first run, for a model that is compiled or holds a compiled part."""
    for path, part in module.named_modules():
        if is_compiled(part):
            inside = type(getattr(module, "_orig_mod", module)).__name__
            found = f"{path!r} of this {type(module).__name__}" if path else f"this {inside}"
            raise ConversionError(
                f"{found} is compiled by torch.compile, and {what} cannot be compiled: {why}; convert the model "
                f"without torch.compile, or take {' or '.join(compilable())} with torch.compile"
            )


def uncompilable_in(module: nn.Module) -> tuple[str, str] | None:
    """Return what ``torch.compile`` cannot compile of a converted model, and why; None if nothing forbids it."""
    for part in module.modules():
        for changed in (part, *ReboundForward.all_of(part), *part._forward_hooks.values()):
            found: tuple[str, str] | None = getattr(changed, "uncompilable", None)
            if found is not None:
                return found
    return None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module comes from ``torch.compile``, or was compiled in place by ``module.compile()``."""
    frame = sys.modules.get("torch._dynamo.eval_frame")  # if the compiler is not imported, nothing is compiled
    returned = frame is not None and isinstance(module, frame.OptimizedModule)
    return returned or vars(module).get("_compiled_call_impl") is not None


def refuse_compiled_around(module: nn.Module, units: Sequence[nn.Module], who: str) -> None:
    """Raise a ConversionError, told by ``who``, if the scheme compile has compiled a model whole, or around a unit."""
    for part in module.modules():
        compiled = any(bound.compiles for bound in ReboundForward.all_of(part))
        if compiled and (part is module or any(unit is not part and unit in part.modules() for unit in units)):
            raise ConversionError(
                f"{who} does not go with compile of the whole model: the hooks that gather parameters run outside of "
                "graphs, so the model gets no graph; compile its blocks alone (only=model.layers.*)"
            )


Gradients = tuple[Tensor | None, ...]


def refuse_second_order(what: str = "a layer that keeps less than its input for backward") -> None:
    """Raise a RuntimeError in a backward pass that builds a graph (``create_graph=True``).

    It raises at once, not when that graph is differentiated: autograd skips a node that leads to none of the tensors
    whose gradient ``torch.autograd.grad`` was asked for, and packed tensors lead to none.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a second derivative was asked of {what} (create_graph=True); "
            "take second derivatives of the unconverted model"
        )


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Make the backward of an autograd function raise a RuntimeError if a second derivative may follow.

    torch's ``once_differentiable`` raises only when its result is differentiated, and only if the incoming gradient
    needs a gradient. If that is a constant, as at the end of a model, the derivative by the input is lost silently.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor) -> Gradients:
        if torch.is_grad_enabled():  # asked here too: each call takes some time of each layer
            refuse_second_order()
        return backward(ctx, *gradients)

    return refusing


def saved_output(ctx: Any, kept: str, otherwise: str) -> tuple[Tensor, ...]:
    """Return the saved tensors of a function that saved its output, which the model may change in place.

    Args:
        ctx: Context of the function.
        kept: Start of the message, which continues with ``modified by an inplace operation``.
        otherwise: Another remedy than to leave that operation out.

    Raises:
        RuntimeError: A saved tensor was changed in place.
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
    """A forward pre-hook that raises if ``DistributedDataParallel`` runs a model with ``what``, and says why."""

    def __init__(self, what: str, why: str) -> None:
        self.what, self.why = what, why

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise a ConversionError if ``DistributedDataParallel`` runs the model."""
        # it is set while the model runs inside of DDP's forward (_inside_ddp_forward)
        if distributed.is_available() and DistributedDataParallel._active_ddp_module is not None:
            raise ConversionError(f"DistributedDataParallel does not go with {self.what}: {self.why}")


def refuse_unshared(module: nn.Module, who: str) -> None:
    """Raise a ConversionError, told by ``who``, for a model that has a :class:`NotInParallel` hook."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, NotInParallel):
            raise ConversionError(f"{who} does not go with {hook.what}: {hook.why}")


def refuse_sharded(module: nn.Module, what: str, why: str) -> None:
    """Raise a ConversionError, with the reason, if FSDP has sharded the parameters of a model with ``what``."""
    refuse_flattened(module, what, why)
    if distributed.is_available() and distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule  # imports as much as all of torch

        _refuse_fsdp(FSDPModule, module, what, why)


def refuse_flattened(module: nn.Module, what: str, why: str) -> None:
    """Raise a ConversionError where FSDP1 has made vectors of the parameters of a model with ``what``, and say why."""
    if distributed.is_available() and distributed.is_initialized():
        from torch.distributed.fsdp import FullyShardedDataParallel

        _refuse_fsdp(FullyShardedDataParallel, module, what, why)


def _refuse_fsdp(kind: type[Any], module: nn.Module, what: str, why: str) -> None:
    if any(isinstance(part, kind) for part in module.modules()):
        raise ConversionError(f"FSDP does not go with {what}: {why}")
