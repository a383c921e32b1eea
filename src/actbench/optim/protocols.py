"""What optimizers may do beyond what torch's do, as those see it who make training steps of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class HoldsGradients(Protocol):
    """An optimizer that holds gradients itself, in a form of its own, while they wait for its step."""

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the gradients by parameter, as the step is given them."""
        ...

    def gradient_parts(self) -> Iterable[Tensor]:
        """Return the tensors that hold them, but those on the parameters themselves."""
        ...


@runtime_checkable
class StepsInBackward(Protocol):
    """An optimizer that steps each parameter as soon as a backward pass has made its gradient."""

    def hold(self) -> None:
        """Let gradients wait for ``step()`` from now on."""
        ...


@runtime_checkable
class HoldsShares(Protocol):
    """An optimizer that knows shares of parameters in place of the parameters of the model."""

    @property
    def wholes(self) -> Mapping[int, nn.Parameter]:
        """The parameters of the model, by the identity of their shares."""
        ...
