"""Gradients of parameters that wait for the step in a number format, and an optimizer that is given them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn, optim
from torch.utils.weak import WeakTensorKeyDictionary

from actbench.codecs.encodings import Encoding
from actbench.errors import ConversionError
from actbench.nn.encoded.form import encoded, gains, takes
from actbench.nn.saved import Packed


class PackedGradients:
    """Takes the gradient off each parameter as soon as a backward pass has made it, and keeps it packed.

    A further backward pass adds to what is packed: it is decoded, added and encoded again. Gradients that are sparse,
    small, or no smaller in the format stay on their parameters.

    Args:
        parameters: Whose gradients; they are not kept alive by this.
        encoding: The format, preferably without bias.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], encoding: Encoding) -> None:
        self.encoding = encoding
        self._packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @staticmethod
    def bytes_of(parameter: Tensor, encoding: Encoding) -> int:
        """Return the bytes that the gradient of a parameter takes while it waits."""
        packs = takes(parameter) and gains(parameter, encoding)
        return encoding.packed_bytes(parameter.shape, parameter.dtype) if packs else parameter.nbytes

    def restored(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter, decoded, or None where none is packed."""
        packed: Packed | None = self._packed.get(parameter)  # type: ignore[no-untyped-call]
        return None if packed is None else packed.unpack()

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that packed gradients consist of."""
        for packed in self._packed.values():  # type: ignore[no-untyped-call]
            yield from packed.parts

    def clear(self) -> None:
        """Forget all gradients."""
        self._packed.clear()

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not takes(gradient) or not gains(gradient, self.encoding):
            return
        earlier = self.restored(parameter)
        if earlier is not None:
            gradient.add_(earlier)
        self._packed[parameter] = encoded(gradient, self.encoding)
        parameter.grad = None


BY_PARAMETER: Final = (optim.SGD, optim.Adam, optim.AdamW)
"""Optimizers of torch that treat each parameter apart."""


class StepByParameter(optim.Optimizer):
    """Steps another optimizer once for each parameter, with that one's gradient alone in memory.

    Groups and state are those of the other optimizer, and so is what :meth:`state_dict` returns. The gradients stay
    packed until :meth:`zero_grad`, as they would stay on the parameters.

    Args:
        inner: Treats each parameter apart from the others, as SGD, Adam and AdamW do.
        packed: Where the gradients are; emptied.
        by_parameter: Classes that do so.

    Raises:
        ConversionError: The optimizer is none of these.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves it to step() to unscale, which refuses

    def __init__(
        self,
        inner: optim.Optimizer,
        packed: PackedGradients,
        by_parameter: tuple[type[optim.Optimizer], ...] = BY_PARAMETER,
    ) -> None:
        if not isinstance(inner, by_parameter):
            raise ConversionError(
                f"gradients cannot wait packed for {type(inner).__name__}, which may need those of all parameters at "
                "once; use SGD, Adam or AdamW, or leave gradients out of on="
            )
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.packed = inner, packed
        self._share()
        packed.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step.

        Args:
            closure: Runs the model forward and backward, and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            ConversionError: An enabled ``GradScaler`` steps this.
        """
        if hasattr(self, "found_inf"):
            raise ConversionError(
                "gradients that wait packed cannot be unscaled by GradScaler, and would be stepped as many times too "
                "large as the loss was; train in bfloat16 without one, or leave gradients out of on="
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.inner.step()  # of those that are not packed
        plain = [(parameter, parameter.grad) for parameter in self._parameters()]
        try:
            for parameter, _ in plain:
                parameter.grad = None
            for parameter, _ in plain:
                self._step_one(parameter)
        finally:
            for parameter, gradient in plain:
                parameter.grad = gradient
        return result

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the gradients that wait for the step, decoded, by parameter."""
        found: dict[Tensor, Tensor] = {}
        for parameter in self._parameters():
            gradient = self.packed.restored(parameter)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                found[parameter] = gradient
        return found

    def gradient_parts(self) -> Iterator[Tensor]:
        """Yield the tensors that packed gradients consist of."""
        return self.packed.held()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.packed.clear()
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of the optimizer inside."""
        self.inner.load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside; gradients of its parameters are not packed."""
        if "inner" in vars(self):
            self.inner.add_param_group(param_group)
            self._share()
        else:
            super().add_param_group(param_group)

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.inner.param_groups:
            yield from group["params"]

    def _step_one(self, parameter: nn.Parameter) -> None:
        """Step a parameter while no other has a gradient: optimizers leave those alone."""
        gradient = self.packed.restored(parameter)
        if gradient is not None:
            parameter.grad = gradient
            self.inner.step()
            parameter.grad = None
