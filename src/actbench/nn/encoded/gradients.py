"""Parameter gradients that wait for the step in a number format, and an optimizer that gets them one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor, nn, optim
from torch.utils.weak import WeakTensorKeyDictionary

from actbench.codecs.encodings import Encoding
from actbench.errors import ConversionError
from actbench.nn.encoded.form import encoded, gains, takes
from actbench.nn.saved import Packed
from actbench.optim.wrapped import WrappedOptimizer


class PackedGradients:
    """Takes the gradient off each parameter as soon as a backward pass has computed it, and packs it.

    A further backward pass adds to it: the packed gradient is decoded, added and encoded again. Gradients that are
    sparse, small, or no smaller in the format stay on their parameters.

    Args:
        parameters: The parameters, which this does not keep alive.
        encoding: The format, preferably unbiased.
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
        """Return the decoded gradient of a parameter, or None if none is packed."""
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
"""Optimizers of torch that treat each parameter separately."""


class StepByParameter(WrappedOptimizer):
    """Steps another optimizer once for each parameter, with only this parameter's gradient in memory.

    The gradients stay packed until :meth:`zero_grad`, as they would stay on the parameters.

    Args:
        inner: The optimizer, which treats each parameter separately, as SGD, Adam and AdamW do.
        packed: The packed gradients; they are cleared.
        by_parameter: Classes of optimizers that treat each parameter separately.

    Raises:
        ConversionError: The optimizer is none of these.
    """

    unscalable: ClassVar[str] = "gradients that wait packed"
    remedy: ClassVar[str] = "leave gradients out of on="

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
        super().__init__(inner)
        self.packed = packed
        packed.clear()

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the decoded gradients that wait for the step, by parameter."""
        found: dict[Tensor, Tensor] = {}
        for parameter in self.parameters():
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
        super().zero_grad(set_to_none)

    def _step(self) -> None:
        self.inner.step()  # steps the parameters whose gradients are not packed
        plain = [(parameter, parameter.grad) for parameter in self.parameters()]
        try:
            for parameter, _ in plain:
                parameter.grad = None
            for parameter, _ in plain:
                self._step_one(parameter)
        finally:
            for parameter, gradient in plain:
                parameter.grad = gradient

    def _step_one(self, parameter: nn.Parameter) -> None:
        """Step a parameter while no other has a gradient: optimizers skip those."""
        gradient = self.packed.restored(parameter)
        if gradient is not None:
            parameter.grad = gradient
            self.inner.step()
            parameter.grad = None
