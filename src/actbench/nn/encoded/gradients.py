"""Gradients of parameters that wait for the optimizer's step in a number format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from actbench.codecs.encodings import Encoding
from actbench.nn.encoded.form import encoded, gains, takes
from actbench.nn.keeping import Kept


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
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @staticmethod
    def bytes_of(parameter: Tensor, encoding: Encoding) -> int:
        """Return the bytes that the gradient of a parameter takes while it waits."""
        packs = takes(parameter) and gains(parameter, encoding)
        return encoding.packed_bytes(parameter.shape, parameter.dtype) if packs else parameter.nbytes

    def restored(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter, decoded, or None where none is packed."""
        kept: Kept | None = self._kept.get(parameter)  # type: ignore[no-untyped-call]
        return None if kept is None else kept.form.restore(kept.parts)

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that packed gradients consist of."""
        for kept in self._kept.values():  # type: ignore[no-untyped-call]
            yield from kept.parts

    def clear(self) -> None:
        """Forget all gradients."""
        self._kept.clear()

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not takes(gradient) or not gains(gradient, self.encoding):
            return
        earlier = self.restored(parameter)
        if earlier is not None:
            gradient.add_(earlier)
        self._kept[parameter] = encoded(gradient, self.encoding)
        parameter.grad = None
