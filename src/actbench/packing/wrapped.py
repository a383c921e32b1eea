"""Wraps every pass through a model, also a pass that begins at a module inside it.

A training step need not call the model: code that cuts a sequence into chunks for the loss calls ``model.model(...)``
and ``model.lm_head(...)``, which a wrapper around only the model's own forward would not see. So an entry is bound on
every module. The outermost module that a step calls begins a pass, and all that runs inside belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from actbench.errors import ConversionError
from actbench.ops.noise import drawn_once
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.refusals import OWN_BACKWARD, is_read, refuse_compiling, refuse_exporting

Rules = Mapping[Callable[..., Any], Callable[..., Any]]
"""Maps a function of torch to its replacement, with the same arguments, by place and by name, and the same result."""

Traced = TypeVar("Traced", bound=Callable[..., Any])

_internals: Any = torch._C


class Intercepted(TorchFunctionMode):
    """Replaces functions of torch by rules, inside a with-block and in the thread that entered it.

    A function is intercepted where the model calls it, not inside another function of torch: ``F.relu`` is intercepted
    in ``nn.ReLU``, but ``F.multi_head_attention_forward`` only as a whole. A replacement runs outside of this and of
    every other function mode. Tensor subclasses that define functions of torch keep theirs.

    One object may be entered several times, at once and in several threads. A recomputation in the backward pass runs
    outside of the block: non-re-entrant checkpointing inside it needs this as ``context_fn``.

    Args:
        rules: The replacements.
        only_if: Called before each replacement, to allow it; None for always.
    """

    def __init__(self, rules: Rules, only_if: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.rules, self._only_if = rules, only_if

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, or what replaces it."""
        rule = self.rules.get(func)
        if rule is None or (types and has_own_functions(types)) or not (self._only_if is None or self._only_if()):
            return func(*args, **kwargs) if kwargs else func(*args)
        # the replacement may call the function that it replaces
        with _internals.DisableTorchFunction():
            return rule(*args, **kwargs) if kwargs else rule(*args)


def has_own_functions(types: tuple[type[Any], ...]) -> bool:
    """Return whether a class of a function's arguments redefines functions of torch."""
    disabled = _internals._disabled_torch_function_impl  # which parameters and fake tensors have
    return any(kind is not Tensor and kind.__torch_function__ is not disabled for kind in types)


Inner = Callable[..., Any]
"""Runs the forward inside a wrapper: takes the module and its arguments."""

_running: ContextVar[tuple[Wrapper, ...]] = ContextVar("_running", default=())


def held_in_graphs(function: Traced) -> Traced:
    """Let a compiled graph hold what a function returns while it is traced.

    torch.compiler.assume_constant_result does the same, and imports the compiler, which takes seconds.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


@held_in_graphs
def in_a_pass() -> bool:
    """Return whether a pass through a wrapped model runs uncompiled around this call."""
    return bool(_running.get())


class Wrapper:
    """Wraps the passes through one model. It refers to no module, so that parts can be copied alone.

    Attributes:
        uncompilable: What cannot be compiled, and why; see :func:`actbench.packing.refusals.refuse_compiling`. None
            for what compiles: a graph then has the modules, and nothing of what wraps them.
        hooked: Whether blocks that are recomputed inside a pass know of its hooks, and of hooks inside themselves.
        recomputes: Whether a block that compiles is recomputed; :func:`bind_entries` finds out.
    """

    uncompilable: tuple[str, str] | None
    hooked: bool = False
    recomputes: bool = False

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Run one pass.

        Args:
            entry: Path of the module where the pass begins; empty for the model itself.
            module: That module.
            inner: Runs the module's inner forward.
            args: The arguments of the module.
            kwargs: The named arguments of the module.
        """
        raise NotImplementedError

    def is_in_graph(self) -> bool:
        """Return whether the modules are compiled now; raise a ConversionError if they cannot be."""
        uncompilable = self.why_uncompiled()
        if uncompilable is None:
            if not torch.compiler.is_compiling():
                return False
            refuse_exporting(*OWN_BACKWARD)
            return True
        refuse_compiling(*uncompilable)
        return False

    def why_uncompiled(self) -> tuple[str, str] | None:
        """Return what cannot be compiled of the model as it is now, and why; None if it can be."""
        return self.uncompilable

    def begins_inside(self) -> bool:
        """Return whether a module inside the model that is called now begins a pass.

        It does not within another pass, nor in a backward pass, where blocks of an earlier pass run again.
        """
        for one in _running.get():  # runs in each call of each module: the usual answer comes first
            if type(one) is type(self):
                return False
        return torch._C._current_graph_task_id() == -1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count modules that run inside the with-block as part of this pass, which draws its seeds at once."""
        token = _running.set((*_running.get(), self))
        try:
            with drawn_once():
                yield
        finally:
            _running.reset(token)


class HookWrapper(Wrapper):
    """A wrapper by saved-tensor hooks; of nested hooks only the innermost run."""

    def begins_inside(self) -> bool:
        """Return whether a module that is called now begins a pass; not if checkpointing takes the saved tensors."""
        return super().begins_inside() and checkpoint_hook() is None


class WrappedForward(ReboundForward):
    """The forward of a wrapped model; :func:`bind_entries` binds the modules inside."""

    wrapper: Wrapper

    @property
    def uncompilable(self) -> tuple[str, str] | None:
        """What cannot be compiled, and why."""
        return self.wrapper.why_uncompiled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as a pass; raise a ConversionError under ``torch.compile``, if gradients are needed."""
        module = self.module
        if not torch.is_grad_enabled():
            return self.inner(module, *args, **kwargs)
        if self.wrapper.is_in_graph():
            return self.in_graph(module, args, kwargs)
        return self.wrapper.run("", module, self.inner, args, kwargs)

    def in_graph(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the model as a part of the graph that is being compiled."""
        return self.inner(module, *args, **kwargs)


class Entry(ReboundForward):
    """The forward of a module inside a model, at this path, where a pass may begin."""

    def __init__(self, module: nn.Module, path: str, wrapper: Wrapper) -> None:
        super().__init__(module)
        self.path, self.wrapper = path, wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, as a pass of its own if none runs around it; raise a ConversionError as the model does."""
        module, wrapper = self.module, self.wrapper
        if torch.is_grad_enabled() and not (is_read() and wrapper.is_in_graph()) and wrapper.begins_inside():
            return wrapper.run(self.path, module, self.inner, args, kwargs)
        return self.inner(module, *args, **kwargs)


def bind_entries(model: nn.Module) -> None:
    """Bind an entry of each wrapper of a model on every module inside, in front of all other forwards."""
    unbind_entries(model)  # an earlier scheme may have bound some
    for root, wrappers in _wrapped(model):
        # what cannot be compiled by itself says so where it is compiled
        recomputes = any(
            bound.recomputes and bound.uncompilable is None
            for part in root.modules()
            for bound in ReboundForward.all_of(part)
        )
        for wrapper in wrappers:
            wrapper.recomputes = recomputes
        for path, part in root.named_modules():
            # the front one is bound last, so that it is in front here too
            for wrapper in reversed(wrappers) if path else ():
                Entry(part, path, wrapper).bind()


def _wrapped(module: nn.Module) -> list[tuple[nn.Module, list[Wrapper]]]:
    """Return the wrapped model, or its outermost wrapped parts, with the wrappers: a scheme may wrap only parts."""
    wrappers = [bound.wrapper for bound in ReboundForward.all_of(module) if isinstance(bound, WrappedForward)]
    return [(module, wrappers)] if wrappers else [found for child in module.children() for found in _wrapped(child)]


def unbind_entries(model: nn.Module) -> None:
    """Take the entries off the modules of a model, except where another forward is in front."""
    for part in model.modules():
        while isinstance(front := vars(part).get("forward"), Entry):
            front.unbind()


def checkpoint_hook() -> Any:
    """Return the hook of torch's non-re-entrant checkpointing, if it takes the tensors saved now, else None.

    Its second run saves them again.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # True: also while a graph is traced
    taken = hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return hooks[0] if taken else None


def given_by_others(inputs: Any, *, graphless: bool) -> list[Tensor]:
    """Return the inputs of a pass that others hold: the batch.

    A tensor from another part of the model has a graph, and only saved tensors hold it.

    Args:
        inputs: The module's arguments, in any nesting.
        graphless: Whether inputs may come from another part of the model; then those that need a gradient do.
    """
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return [leaf for leaf in given if not graphless or not leaf.requires_grad]


def refuse_hooks_inside(model: nn.Module) -> None:
    """Raise a ConversionError if hooks that pack or move saved tensors are bound inside of a recomputed block.

    Of nested hooks only the innermost run. The block's own hooks, which find out what to recompute, would not see the
    tensors that hooks inside take. Hooks around blocks are fine: blocks know of them.
    """
    _refuse_hooks(model, "", None)


def _refuse_hooks(module: nn.Module, path: str, block: str | None) -> None:
    hooked = False
    for bound in ReboundForward.all_of(module):  # the front one runs around the others
        if bound.recomputes and not hooked:
            block = path
        wrapper = bound.wrapper if isinstance(bound, WrappedForward) else None
        if isinstance(wrapper, HookWrapper) and block is not None:
            raise ConversionError(
                f"{block or 'the model'} is recomputed in the backward pass, and hooks pack or move what {path} saves: "
                "only the innermost of nested hooks run, so nothing there would be recomputed; let only= of the "
                "scheme that packs name the whole block, or leave only= out, so that it packs what the block keeps; or "
                "name parts in only= that do not overlap"
            )
        hooked = hooked or (wrapper is not None and wrapper.hooked and block is None)
    for name, child in module.named_children() if not hooked else ():
        _refuse_hooks(child, f"{path}.{name}" if path else name, block)
