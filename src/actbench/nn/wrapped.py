"""Standing around every pass through a model, also one that begins at a module inside of it.

A training step need not call the model: code that cuts a sequence into chunks for the loss calls ``model.model(...)``
and ``model.lm_head(...)``, and what stood around the model's own forward alone would see nothing of that. So an entry
is bound on every module. The outermost module that a step calls begins a pass, and all that runs inside belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from actbench.nn.forwardwrapper import ReboundForward
from actbench.nn.refusals import refuse_compiling

Rules = Mapping[Callable[..., Any], Callable[..., Any]]
"""From a function of torch to what takes its place: same arguments, by place and by name, and same result."""

_internals: Any = torch._C


class Intercepted(TorchFunctionMode):
    """Replaces functions of torch by rules, inside of a with-block and in the thread that entered it.

    A function is seen where the model calls it, and not inside of another function of torch: of ``nn.ReLU`` it is
    ``F.relu`` that is seen, and of ``F.multi_head_attention_forward`` the whole. A replacement runs outside of this and
    of every other mode for functions. Tensor subclasses that define functions of their own keep theirs.

    One object may be entered several times, at once and in several threads. What runs again in the backward pass does
    so outside: non-re-entrant checkpointing inside of the block needs it as ``context_fn``.

    Args:
        rules: What is replaced.
        only_if: Asked before each replacement; None for always.
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
        with _internals.DisableTorchFunction():
            return rule(*args, **kwargs) if kwargs else rule(*args)


def has_own_functions(types: tuple[type[Any], ...]) -> bool:
    """Return whether a class among those of a function's arguments defines functions of torch anew."""
    disabled = _internals._disabled_torch_function_impl  # that of parameters and fake tensors
    return any(kind is not Tensor and kind.__torch_function__ is not disabled for kind in types)


Inner = Callable[..., Any]
"""Runs what stands behind a forward: of a module, and of what it is called with."""

_running: ContextVar[tuple[Wrapper, ...]] = ContextVar("_running", default=())


class Wrapper:
    """What a scheme puts around the passes through one model. It knows no module, so that parts can be copied alone.

    Class attributes that a kind of wrapper gives:
        uncompilable: What cannot be compiled, and why; see :func:`actbench.nn.refusals.refuse_compiling`.
    """

    uncompilable: ClassVar[tuple[str, str]]

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Run one pass.

        Args:
            entry: Path of the module that the pass begins at; empty for the model itself.
            module: That module.
            inner: Runs what stands behind.
            args: What the module is called with.
            kwargs: The same.
        """
        raise NotImplementedError

    def refuse_compiling(self) -> None:
        """Raise a ConversionError under ``torch.compile``."""
        refuse_compiling(*self.uncompilable)

    def begins_inside(self) -> bool:
        """Return whether a module that is called now, and is not the model, begins a pass.

        It does not within another pass, nor in a backward pass, where blocks run again that were a part of one.
        """
        for one in _running.get():  # asked in each call of each module: the usual answer comes first
            if type(one) is type(self):
                return False
        return torch._C._current_graph_task_id() == -1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let modules that run inside of the with-block belong to this pass."""
        token = _running.set((*_running.get(), self))
        try:
            yield
        finally:
            _running.reset(token)


class HookWrapper(Wrapper):
    """A wrapper by saved-tensor hooks, of which the innermost alone run."""

    def begins_inside(self) -> bool:
        """Return whether a module that is called now begins a pass: not where checkpointing takes what is saved."""
        return super().begins_inside() and checkpoint_hook() is None


class WrappedForward(ReboundForward):
    """The forward of a model whose passes a wrapper stands around; :func:`bind_entries` does the rest."""

    wrapper: Wrapper

    @property
    def uncompilable(self) -> tuple[str, str]:
        """What cannot be compiled, and why."""
        return self.wrapper.uncompilable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as a pass.

        Raises:
            ConversionError: Under ``torch.compile``, where gradients are wanted.
        """
        module = self.module
        if not torch.is_grad_enabled():
            return self.inner(module, *args, **kwargs)
        self.wrapper.refuse_compiling()
        return self.wrapper.run("", module, self.inner, args, kwargs)


class Entry(ReboundForward):
    """The forward of a module inside of a model, at this path: a pass may begin at it."""

    def __init__(self, module: nn.Module, path: str, wrapper: Wrapper) -> None:
        super().__init__(module)
        self.path, self.wrapper = path, wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, as a pass of its own where nothing of the model runs around it.

        Raises:
            ConversionError: Under ``torch.compile``.
        """
        module = self.module
        if not torch.is_grad_enabled():
            return self.inner(module, *args, **kwargs)
        self.wrapper.refuse_compiling()
        if not self.wrapper.begins_inside():
            return self.inner(module, *args, **kwargs)
        return self.wrapper.run(self.path, module, self.inner, args, kwargs)

    def _twin(self, module: nn.Module) -> Self:
        return type(self)(module, self.path, self.wrapper)


def bind_entries(model: nn.Module) -> None:
    """Bind an entry of each wrapper of a model on every module inside, in front of all forwards that stand there."""
    unbind_entries(model)  # there are some where a scheme goes on with what another one began
    for root, wrappers in _wrapped(model):
        for path, part in root.named_modules():
            for wrapper in reversed(wrappers) if path else ():
                Entry(part, path, wrapper).bind()


def _wrapped(module: nn.Module) -> list[tuple[nn.Module, list[Wrapper]]]:
    """Return the model, or the outermost parts of it, that wrappers stand on, with these: a scheme may be of parts."""
    wrappers = [bound.wrapper for bound in ReboundForward.all_of(module) if isinstance(bound, WrappedForward)]
    return [(module, wrappers)] if wrappers else [found for child in module.children() for found in _wrapped(child)]


def unbind_entries(model: nn.Module) -> None:
    """Take all entries off the modules of a model where nobody has put another forward in front."""
    for part in model.modules():
        while isinstance(front := vars(part).get("forward"), Entry):
            front.unbind()


def checkpoint_hook() -> Any:
    """Return the hook by which torch's non-re-entrant checkpointing takes what is saved now, or None.

    Its second run saves it again.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    taken = hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return hooks[0] if taken else None


def given_by_others(inputs: Any, *, graphless: bool) -> list[Tensor]:
    """Return the tensors that a pass is given and somebody else holds on to: the batch.

    What another part of the model has made has a graph, and is held by what saves it alone.

    Args:
        inputs: What the module is called with, in any nesting.
        graphless: Whether they may come from another part of the model; then those that need a gradient do.
    """
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return [leaf for leaf in given if not graphless or not leaf.requires_grad]
