"""Binds a new forward on a module, and saves in checkpoints what such a forward has adapted.

A wrapper module would rename every parameter below it and hide attributes such as ``config``; a new forward changes
neither names nor types. It refers to its module weakly, as the module holds it: so a model is freed as soon as its last
user drops it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NoReturn, Protocol, Self, runtime_checkable

from torch import nn

from actbench.errors import ConversionError


def refuse_replicas() -> NoReturn:
    """Raise a ConversionError in place of the copy that ``nn.DataParallel`` makes of a module for each device."""
    raise ConversionError(
        "nn.DataParallel does not go with a converted model: it runs copies that live for one pass, and what a scheme "
        f"learns would be lost with them; {_INSTEAD}, or let the program see one device"
    )


def refuse_data_parallel(model: nn.Module) -> None:
    """Raise a ConversionError for a model that is, or holds, an ``nn.DataParallel``."""
    for path, part in model.named_modules():
        if isinstance(part, nn.DataParallel):
            raise ConversionError(
                f"{repr(path) if path else 'this model'} is a {type(part).__name__}, which does not go with a "
                f"converted model: convert the {type(part.module).__name__} inside (its .module), and {_INSTEAD}"
            )


_INSTEAD = "use torch.nn.parallel.DistributedDataParallel, one process for each device (torchrun or accelerate launch)"


class ReboundForward:
    """A forward that is bound on a module in front of its earlier forward.

    A deep or pickled copy of the module gets its own forward. ``nn.DataParallel`` is refused.

    Attributes:
        recomputes: Whether it runs the module again in the backward pass.
        compiles: Whether it runs the module as compiled graphs.
    """

    recomputes = False
    compiles = False

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._before: Callable[..., Any] | None = vars(module).get("forward")

    @property
    def module(self) -> nn.Module:
        """The module that this forward is bound to; a ReferenceError if the module is freed."""
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward is gone; keep the module, and call it")
        return module

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return the forward of this class that is bound on a module, or None."""
        return next((bound for bound in ReboundForward.all_of(module) if isinstance(bound, cls)), None)

    @staticmethod
    def all_of(module: nn.Module) -> Iterator[ReboundForward]:
        """Yield the rebound forwards of a module, the front one first."""
        bound = vars(module).get("forward")
        while isinstance(bound, ReboundForward):
            yield bound
            bound = bound._before

    @property
    def uncompilable(self) -> tuple[str, str] | None:
        """What ``torch.compile`` cannot compile here, and why; None if it can."""
        return None

    def bind(self) -> None:
        """Make this the forward of the module."""
        vars(self.module)["forward"] = self
        # a replica would run this forward, and so the weights of the module on the first device
        vars(self.module)["_replicate_for_data_parallel"] = refuse_replicas

    def unbind(self) -> None:
        """Take this forward off the module; raise a ConversionError if another was bound in front of it since."""
        module = self.module
        if vars(module).get("forward") is not self:
            raise ConversionError(
                f"{type(self).__name__} cannot be taken off {type(module).__name__}: another forward was bound "
                "in front of it since; take off that other forward first"
            )
        del vars(module)["forward"]
        if self._before is not None:
            vars(module)["forward"] = self._before
        if not isinstance(self._before, ReboundForward):
            del vars(module)["_replicate_for_data_parallel"]

    def inner(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the earlier forward, on the module from :attr:`module`."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with what the subclass puts around it."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the earlier forward; trainers choose a batch's columns by it."""
        before = self._before or getattr(type(self.module).forward, "__get__")(self.module)  # noqa: B009
        return inspect.signature(before)

    @property
    def __code__(self) -> CodeType:
        """The code of the earlier forward, which torch.export names in its messages."""
        code: CodeType = getattr(self._before or type(self.module).forward, "__code__")  # noqa: B009
        return code

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])


@runtime_checkable
class Adapted(Protocol):
    """A bound forward whose scheme adapts while the model trains."""

    def adapted(self) -> Any:
        """Return all that the next step depends on: dicts, lists and tuples of plain values and tensors, not copied."""
        ...

    def adapt(self, state: Any) -> None:
        """Restore what :meth:`adapted` returned for a model built equally; raise a KeyError for another model's."""
        ...


def adapted_states(module: nn.Module) -> dict[str, Any]:
    """Return the states of a model's adapting forwards, by the module's path and the forward's class."""
    return {name: forward.adapted() for name, forward in _forwards(module).items()}


def adapt(module: nn.Module, states: dict[str, Any]) -> None:
    """Restore the states that :func:`adapted_states` returned; raise a KeyError for those of another model."""
    forwards = _forwards(module)
    if forwards.keys() != states.keys():
        raise KeyError(f"the checkpoint has states of {sorted(states)}, the model has {sorted(forwards)}")
    for name, forward in forwards.items():
        forward.adapt(states[name])


def _forwards(module: nn.Module) -> dict[str, Adapted]:
    return {
        f"{path}:{type(forward).__name__}": forward
        for path, child in module.named_modules()
        for forward in ReboundForward.all_of(child)
        if isinstance(forward, Adapted)
    }
