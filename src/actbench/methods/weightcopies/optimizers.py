"""Optimizers that hold a copy of each parameter: one that they step in its place, or its moving average."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from actbench.errors import ConversionError
from actbench.scheme.wrapped import HoldsGradients, StepsInBackward, called

_COPY = "copy"
_HALF: Final = (torch.bfloat16, torch.float16)


class CopyingOptimizer(optim.Optimizer):
    """Another optimizer, ``inner``, with a copy of each parameter, which is in the state under ``copy``.

    Copies of parameters of a half type are of float32, and other copies have the parameter's type.

    Args:
        inner: A fresh optimizer of the parameters; it is taken over.

    Raises:
        ConversionError: The optimizer has state of parameters already, or holds gradients itself.
    """

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        if isinstance(inner, HoldsGradients | StepsInBackward):
            raise ConversionError(
                f"copies of weights do not work with {type(inner).__name__}, which holds or steps gradients itself"
            )
        if inner.state:
            raise ConversionError(
                f"the {type(inner).__name__} has stepped already, without copies of the weights; make a fresh one"
            )
        self.inner = inner
        self.copies: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            self._copy(group["params"])
        self._show_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and return what the closure returned."""
        result = called(closure)
        for group, own in zip(self.inner.param_groups, self.param_groups, strict=True):  # options may have changed
            group.update({name: value for name, value in own.items() if name != "params"})
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside too, with copies of its parameters as they are now."""
        super().add_param_group(param_group)
        if "inner" in vars(self):
            group = self.param_groups[-1]
            self._copy(group["params"])
            self.inner.add_param_group({**group, "params": [self._stepped(each) for each in group["params"]]})
            self._show_state()

    def _copy(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
                self.copies[parameter] = parameter.detach().to(dtype=dtype, copy=True)

    def _stepped(self, parameter: nn.Parameter) -> Tensor:
        """Return what the inner optimizer steps in place of a parameter."""
        return parameter

    def _step(self) -> None:
        raise NotImplementedError

    def _show_state(self) -> None:
        for parameter, copy in self.copies.items():
            self.state[parameter] = {_COPY: copy, **self.inner.state.get(self._stepped(parameter), {})}


class MasterOptimizer(CopyingOptimizer):
    """Steps float32 copies of parameters of a half type, and rounds them into the parameters.

    A parameter without a gradient since :meth:`zero_grad` is left as it is.

    Args:
        inner: A fresh optimizer of the parameters; it is taken over.
        main_gradients: Whether gradients are added up in float32 from the moment when a backward pass made them. They
            take 4 bytes an element from the beginning, and gradients of the half type none for long. Otherwise those
            wait, and are cast for the step.

    Raises:
        ConversionError: As for :class:`CopyingOptimizer`; and in a step, an enabled ``GradScaler`` takes it.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves it to step() to unscale, which refuses

    def __init__(self, inner: optim.Optimizer, *, main_gradients: bool) -> None:
        self._adds_up = main_gradients
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._got: set[nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        super().__init__(inner)
        for group in inner.param_groups:
            group["params"] = [self._stepped(parameter) for parameter in group["params"]]
        self._remove = weakref.finalize(self, _remove, self._hooks)
        self._remove.atexit = False

    def release(self) -> None:
        """Drop the accumulated gradients; from now on each parameter holds its own gradient."""
        self._remove()
        self._adds_up = False
        self._gradients.clear()
        self._got.clear()

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the gradients by parameter, as the step is given them; those of float32 as copies."""
        found: dict[Tensor, Tensor] = {}
        for parameter in self.copies:
            if parameter in self._got:
                found[parameter] = self._gradients[parameter].clone()
            elif parameter.grad is not None:
                found[parameter] = parameter.grad
        return found

    def gradient_parts(self) -> Iterable[Tensor]:
        """Return the tensors that hold them, but those on the parameters themselves."""
        return self._gradients.values()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those of float32 keep their memory. Without ``set_to_none`` they count as zeros."""
        super().zero_grad(set_to_none)
        if set_to_none:
            self._got.clear()
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))

    def _copy(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        super()._copy(parameters)
        if not self._adds_up:
            return
        add = _adding(self._gradients, self._got)
        for parameter in filter(self.copies.__contains__, parameters):
            self._gradients[parameter] = torch.zeros_like(self.copies[parameter])
            self._hooks.append(parameter.register_post_accumulate_grad_hook(add))  # type: ignore[no-untyped-call]

    def _stepped(self, parameter: nn.Parameter) -> Tensor:
        return self.copies.get(parameter, parameter)

    def _step(self) -> None:
        if hasattr(self, "found_inf"):
            raise ConversionError("GradScaler does not go with master weights; train in bfloat16 without one")
        for parameter, copy in self.copies.items():
            if parameter in self._got:
                copy.grad = self._gradients[parameter]
            elif parameter.grad is not None:
                copy.grad = parameter.grad.to(copy.dtype)
        self.inner.step()
        for parameter, copy in self.copies.items():
            if copy.grad is not None:
                copy.grad = None
                parameter.copy_(copy)


def _adding(gradients: dict[nn.Parameter, Tensor], got: set[nn.Parameter]) -> Callable[[nn.Parameter], None]:
    """Return a hook that takes the gradient off a parameter and adds it to another; it keeps no optimizer alive."""

    @torch.no_grad()
    def add(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            gradients[parameter].add_(parameter.grad)
            got.add(parameter)
            parameter.grad = None

    return add


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class AveragingOptimizer(CopyingOptimizer):
    """Steps the inner optimizer, and then moves the average of each parameter towards it.

    Args:
        inner: A fresh optimizer of the parameters; it is taken over.
        decay: Share of the average that a step keeps.
    """

    def __init__(self, inner: optim.Optimizer, decay: float) -> None:
        super().__init__(inner)
        self.decay = decay

    def _step(self) -> None:
        self.inner.step()
        same_type = {parameter: copy for parameter, copy in self.copies.items() if parameter.dtype == copy.dtype}
        if same_type:
            torch._foreach_lerp_(list(same_type.values()), list(same_type), 1 - self.decay)
        for parameter, copy in self.copies.items():
            if parameter not in same_type:
                copy.lerp_(parameter.to(copy.dtype), 1 - self.decay)
