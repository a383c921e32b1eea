"""A card with hand-made numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.units import GIB


class Card:
    """A card with hand-made numbers; each is different."""

    name = "NVIDIA GeForce RTX 4090"
    capability = (8, 9)
    total_bytes = 24 * GIB
    devices = 1

    def __init__(self) -> None:
        self.peak, self.reserved = 5 * GIB, 7 * GIB

    def allocated_bytes(self) -> int:
        return 3 * GIB

    def peak_allocated_bytes(self) -> int:
        return self.peak

    def reserved_bytes(self) -> int:
        return self.reserved

    def peak_reserved_bytes(self) -> int:
        return 8 * GIB

    def free_bytes(self) -> int:
        return 16 * GIB

    def limit_to(self, fraction: float) -> str:
        return f"limited to {fraction:g}"

    def configure(self, settings: str) -> None: ...

    def reset_peak(self) -> None:
        self.peak = self.allocated_bytes()

    def empty_cache(self) -> None:
        self.reserved = 4 * GIB


def product() -> Tensor:
    return torch.ones(2, 2) @ torch.ones(2, 2)
