"""What a layer gains when a class is put before its own: it keeps its input through a keeper."""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.nn.keeping import Keeper, Place


class Compressed:
    """A layer that is itself in all but what its backward pass has of its input.

    Attributes:
        keeper: Keeps for the whole model.
        place: This layer's input.
    """

    keeper: Keeper
    place: Place

    def extra_repr(self) -> str:
        """Add the bits that are kept to what the layer says of itself."""
        said: str = super().extra_repr()  # type: ignore[misc]
        return f"{said}, kept in {self.place.bits:g} bits" if self.keeper.compress else said


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Return whether a gradient is wanted of any of the tensors, which are real ones: others are left to torch."""
    given = [tensor for tensor in tensors if tensor is not None]
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return wanted and not any(tensor.is_complex() for tensor in given)
