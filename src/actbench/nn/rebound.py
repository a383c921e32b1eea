"""Put something around the forward of a module by binding a new one on the instance.

A wrapper module would rename every parameter below it and hide attributes such as ``config``; a new forward changes
neither name nor type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self

from torch import nn


class ReboundForward:
    """A forward that stands on an instance in front of the one it had; a copy of the module gets its own.

    Args:
        module: The module it is bound to.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before: Callable[..., Any] | None = vars(module).get("forward")

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return the forward of this class that is bound on a module, or None; one may stand in front of another."""
        bound = vars(module).get("forward")
        while isinstance(bound, ReboundForward):
            if isinstance(bound, cls):
                return bound
            bound = bound._before
        return None

    def bind(self) -> None:
        """Make this the forward of the module."""
        vars(self.module)["forward"] = self

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that stood there before."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with what the subclass puts around it."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the forward in front of which this stands; trainers choose a batch's columns by it."""
        before = self._before or getattr(type(self.module).forward, "__get__")(self.module)  # noqa: B009
        return inspect.signature(before)
