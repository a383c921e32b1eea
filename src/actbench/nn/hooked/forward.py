"""A model whose forward runs under hooks that pack what is saved."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from actbench.nn.eager import refuse_compiling
from actbench.nn.hooked.hooks import Hooks
from actbench.nn.hooked.probing import Probing
from actbench.nn.rebound import ReboundForward


class HookedForward(ReboundForward):
    """A forward under packing hooks.

    Args:
        module: The model.
        hooks: What packs.
        probing: What shares the bits out among the tensors from time to time; None leaves them as they are.
    """

    def __init__(self, module: nn.Module, hooks: Hooks, probing: Probing | None = None) -> None:
        super().__init__(module)
        self.hooks, self.probing = hooks, probing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with its saved tensors packed.

        Raises:
            ConversionError: Under ``torch.compile``, which does not trace the hooks.
        """
        module = self.module
        if not torch.is_grad_enabled():
            return self.inner(module, *args, **kwargs)
        refuse_compiling("a model whose saved tensors are packed by hooks", "torch.compile does not trace the hooks")
        if self.probing is not None and module.training:
            self.probing.step(self.hooks, module, self._run, args, kwargs)
        return self._run(module, *args, **kwargs)

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.hooks.around(module, (args, kwargs)):
            return self.inner(module, *args, **kwargs)

    def adapted(self) -> Any:
        """Return the bits, and when they were shared out; see :class:`actbench.nn.adapted.Adapted`."""
        return {"places": self.hooks.places.adapted(), "passes": self.probing and self.probing.passes}

    def adapt(self, state: Any) -> None:
        """Go on from what :meth:`adapted` returned."""
        self.hooks.places.adapt(state["places"])
        if self.probing is not None:
            self.probing.passes = state["passes"]

    def _on(self, module: nn.Module) -> Self:
        """Return this forward for a replica, which lives for one step and keeps the bits that it finds."""
        twin = type(self)(module, self.hooks.twin())
        twin._before = self._before._on(module) if isinstance(self._before, ReboundForward) else self._before
        return twin
