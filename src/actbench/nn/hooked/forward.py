"""A model whose passes run under hooks that pack what is saved."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from actbench.nn.hooked.hooks import Hooks
from actbench.nn.hooked.sensitivity import Probing
from actbench.nn.wrapped import HookWrapper, Inner, WrappedForward

HOOKS = ("a model whose saved tensors are packed by hooks", "torch.compile does not trace the hooks")
"""What cannot be compiled, and why."""


class Packing(HookWrapper):
    """Packing hooks around the passes through a model.

    Args:
        hooks: What packs.
        probing: What shares the bits out among the tensors from time to time; None leaves them as they are.
    """

    uncompilable = HOOKS

    def __init__(self, hooks: Hooks, probing: Probing | None) -> None:
        self.hooks, self.probing = hooks, probing

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Run a pass with its saved tensors packed, and share the bits out before it where it is time."""

        def packed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.running(), self.hooks.around(module, (args, kwargs), entry):
                return inner(module, *args, **kwargs)

        if self.probing is not None and module.training:
            self.probing.step(self.hooks, module, packed, args, kwargs, entry)
        return packed(module, *args, **kwargs)


class HookedForward(WrappedForward):
    """A forward under packing hooks.

    Args:
        module: The model.
        hooks: What packs.
        probing: What shares the bits out among the tensors from time to time; None leaves them as they are.
    """

    wrapper: Packing

    def __init__(self, module: nn.Module, hooks: Hooks, probing: Probing | None = None) -> None:
        super().__init__(module)
        self.wrapper = Packing(hooks, probing)

    @property
    def hooks(self) -> Hooks:
        """What packs."""
        return self.wrapper.hooks

    @property
    def probing(self) -> Probing | None:
        """What shares the bits out from time to time."""
        return self.wrapper.probing

    @probing.setter
    def probing(self, probing: Probing | None) -> None:
        self.wrapper.probing = probing

    def adapted(self) -> Any:
        """Return the bits, and when they were shared out; see :class:`actbench.nn.adapted.Adapted`."""
        own = self._adapted("")
        parts = {entry: self._adapted(entry) for entry in self.hooks.entries if entry}
        return {**own, "parts": parts} if parts else own

    def _adapted(self, entry: str) -> dict[str, Any]:
        passes = None if self.probing is None else self.probing.passes[entry]
        return {"places": self.hooks.of_entry(entry).adapted(), "passes": passes}

    def adapt(self, state: Any) -> None:
        """Go on from what :meth:`adapted` returned."""
        for entry, part in {"": state, **state.get("parts", {})}.items():
            self.hooks.of_entry(entry).adapt(part["places"])
            if self.probing is not None and part["passes"] is not None:
                self.probing.passes[entry] = part["passes"]

    def _twin(self, module: nn.Module) -> Self:
        """Return this forward for a replica, which lives for one step and keeps the bits that it finds."""
        return type(self)(module, self.hooks.twin())
