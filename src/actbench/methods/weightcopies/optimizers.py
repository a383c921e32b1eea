"""Optimizers that hold a copy of each parameter: one that they step in its place, or its moving average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from actbench.errors import ConversionError
from actbench.scheme.wrapped import HoldsGradients, StepsInBackward, called

_COPY = "copy"


class CopyingOptimizer(optim.Optimizer):
    """Another optimizer, ``inner``, with a copy of each parameter, which is in the state under ``copy``.

    Args:
        inner: A fresh optimizer of the parameters; it is taken over.
        dtype: The type of the copies; None for the type of each parameter.

    Raises:
        ConversionError: The optimizer has state of parameters already, or holds gradients itself.
    """

    def __init__(self, inner: optim.Optimizer, dtype: torch.dtype | None) -> None:
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        if isinstance(inner, HoldsGradients | StepsInBackward):
            raise ConversionError(
                f"copies of weights are not kept beside {type(inner).__name__}, which holds or steps gradients itself"
            )
        if inner.state:
            raise ConversionError(
                f"the {type(inner).__name__} has stepped already, without copies of the weights; make a fresh one"
            )
        self.inner = inner
        self.copies: dict[nn.Parameter, Tensor] = {
            parameter: parameter.detach().to(dtype=dtype or parameter.dtype, copy=True)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        self._show_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and return what the closure returned.

        Raises:
            ConversionError: An enabled ``GradScaler`` steps this.
        """
        if hasattr(self, "found_inf"):
            raise ConversionError("GradScaler does not go with copies of the weights; train in bfloat16 without one")
        result = called(closure)
        self._follow_options()
        self._step()
        self._show_state()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, with the copies in the order of the parameters."""
        return {**self.inner.state_dict(), "copies": list(self.copies.values())}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        copies = state_dict["copies"]
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != "copies"})
        for own, loaded in zip(self.copies.values(), copies, strict=True):
            own.copy_(loaded)
        for group, loaded in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        self._show_state()

    def _stepped(self, parameter: nn.Parameter) -> Tensor:
        """Return what the inner optimizer steps in place of a parameter."""
        return parameter

    def _step(self) -> None:
        raise NotImplementedError

    def _follow_options(self) -> None:
        """Give the inner optimizer the options that the groups have now."""
        for group, own in zip(self.inner.param_groups, self.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})

    def _show_state(self) -> None:
        for parameter, copy in self.copies.items():
            self.state[parameter] = {_COPY: copy, **self.inner.state.get(self._stepped(parameter), {})}


class MasterOptimizer(CopyingOptimizer):
    """Steps float32 copies of parameters of a half type, and rounds them into the parameters.

    Args:
        inner: A fresh optimizer of the parameters; it is taken over.
        main_gradients: Whether gradients are added up in float32 from the moment when a backward pass made them. They
            take 4 bytes an element from the beginning, and gradients of the half type none for long. Otherwise those
            wait, and are cast for the step.

    Raises:
        ConversionError: As for :class:`CopyingOptimizer`.
    """

    def __init__(self, inner: optim.Optimizer, *, main_gradients: bool) -> None:
        super().__init__(inner, torch.float32)
        for group in inner.param_groups:
            group["params"] = [self.copies.get(parameter, parameter) for parameter in group["params"]]
        self._gradients: dict[nn.Parameter, Tensor] = {}
        if main_gradients:
            self._gradients = {parameter: torch.zeros_like(copy) for parameter, copy in self.copies.items()}
        add = _adding(self._gradients)
        hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in self._gradients]  # type: ignore[no-untyped-call]
        self._hooks: list[RemovableHandle] = hooks

    def release(self) -> None:
        """Leave gradients to their parameters from now on, and forget those that were added up."""
        for hook in self._hooks:
            hook.remove()
        self._gradients.clear()

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the gradients by parameter, as the step is given them; those of float32 as copies."""
        found: dict[Tensor, Tensor] = {}
        for parameter in self.copies:
            if parameter in self._gradients:
                found[parameter] = self._gradients[parameter].clone()
            elif parameter.grad is not None:
                found[parameter] = parameter.grad
        return found

    def gradient_parts(self) -> Iterable[Tensor]:
        """Return the tensors that hold them, but those on the parameters themselves."""
        return self._gradients.values()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those of float32 keep their memory."""
        super().zero_grad(set_to_none)
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))

    def _stepped(self, parameter: nn.Parameter) -> Tensor:
        return self.copies[parameter]

    def _step(self) -> None:
        for parameter, copy in self.copies.items():
            if self._gradients:
                copy.grad = self._gradients[parameter]
            elif parameter.grad is not None:
                copy.grad = parameter.grad.to(copy.dtype)
        self.inner.step()
        for parameter, copy in self.copies.items():
            copy.grad = None
            parameter.copy_(copy)


def _adding(gradients: dict[nn.Parameter, Tensor]) -> Callable[[nn.Parameter], None]:
    """Return a hook that takes the gradient off a parameter and adds it to another; it keeps no optimizer alive."""

    @torch.no_grad()
    def add(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            gradients[parameter].add_(parameter.grad)
            parameter.grad = None

    return add


class AveragingOptimizer(CopyingOptimizer):
    """Steps the inner optimizer, and then moves the average of each parameter towards it.

    Args:
        inner: A fresh optimizer of the parameters; it is taken over.
        decay: Share of the average that a step keeps.
    """

    def __init__(self, inner: optim.Optimizer, decay: float) -> None:
        super().__init__(inner, None)
        self.decay = decay

    def _step(self) -> None:
        self.inner.step()
        torch._foreach_lerp_(list(self.copies.values()), list(self.copies), 1 - self.decay)
