"""Where and with what a case was measured, and what others published of it."""

from __future__ import annotations

from typing import Literal

from actbench.model.data import Data
from actbench.units import PositiveInt


class Machine(Data):
    """Where a case was measured."""

    name: str
    system: str
    processor: str
    cores: PositiveInt
    memory_bytes: PositiveInt
    gpu: str | None = None
    gpu_memory_bytes: PositiveInt | None = None
    driver: str | None = None

    @property
    def identity(self) -> tuple[str, str | None]:
        """The name and the GPU, which may be exchanged: together they identify the machine."""
        return self.name, self.gpu


class Versions(Data):
    """What a case was measured with. ``dirty`` is true when the checkout had uncommitted changes."""

    actbench: str
    python: str
    torch: str
    torchvision: str | None = None
    transformers: str | None = None
    numba: str | None = None
    cuda: str | None = None
    cupy: str | None = None
    commit: str | None = None
    dirty: bool | None = None


class Published(Data):
    """A figure that the authors of a scheme published.

    Attributes:
        quantity: Meaning of the figure: ``peak_saving`` is the saved share of exact's peak (0.138 = 13.8 %),
            ``batch_ratio`` the largest batch over exact's, ``activation_ratio`` exact's activation bytes over its own.
        setting: Model, batch, hardware.
        source: Where it was published.
    """

    quantity: Literal["peak_saving", "peak_bytes", "batch_ratio", "largest_batch", "activation_ratio", "accuracy"]
    value: float
    setting: str
    source: str
