"""What schemes have learned while a model trained and keep beside its parameters and buffers, for checkpoints."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn

from actbench.nn.forwardwrapper import ReboundForward


@runtime_checkable
class Adapted(Protocol):
    """A bound forward whose scheme adapts while the model trains."""

    def adapted(self) -> Any:
        """Return all that the next step depends on: dicts, lists and tuples of plain values and tensors, not copied."""
        ...

    def adapt(self, state: Any) -> None:
        """Go on from what :meth:`adapted` returned for a model that was built alike.

        Raises:
            KeyError: It is of another model.
        """
        ...


def adapted_states(module: nn.Module) -> dict[str, Any]:
    """Return the states of a model's forwards that adapt, by the module's path and the forward's class."""
    return {name: forward.adapted() for name, forward in _forwards(module).items()}


def adapt(module: nn.Module, states: dict[str, Any]) -> None:
    """Bring a freshly converted model to where :func:`adapted_states` was called.

    Raises:
        KeyError: The states are those of another model.
    """
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
