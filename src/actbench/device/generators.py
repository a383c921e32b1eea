"""Random generators of a simulated card: the CPU's, with the device and the state of CUDA's."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from actbench.device.streams import checked

_HostGenerator: Any = torch._C.Generator  # of C, whose attributes a subclass may well define anew


class _AnyGenerator(type(_HostGenerator)):  # type: ignore[misc]
    """``isinstance(x, torch.Generator)`` also holds for generators that were made before."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _HostGenerator)


class CardGenerator(_HostGenerator):  # type: ignore[misc]
    """A generator that draws on the host, as every tensor is there, and says that it is on the card.

    Its state is CUDA's, 16 bytes (8 of the seed and 8 of an offset), while the CPU's state has 5,056. The offset stands
    for a state of the CPU's that this generator had. A state of another generator starts at that one's seed.
    """

    index: int
    states: dict[bytes, Tensor]

    @property
    def device(self) -> torch.device:
        """The card."""
        return torch.device("cuda", self.index)

    def get_state(self) -> Tensor:
        """Return 16 bytes, uint8, on the host."""
        # the state is real, and modes would make it fake
        with _disable_current_modes():
            state = super().get_state()
            digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
            told = struct.pack("<Q", self.initial_seed() % 2**64) + digest
            self.states[told] = state
            return torch.frombuffer(bytearray(told), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> CardGenerator:
        """Take 16 bytes, uint8, on the host; of a tensor without values nothing can be taken.

        Raises:
            RuntimeError: The state has another type or size; torch raises the same.
        """
        if isinstance(state, FakeTensor):
            return self
        if state.dtype != torch.uint8 or state.numel() != 16:
            raise RuntimeError(f"RNG state is wrong size: a CUDA generator has 16 bytes, not {state.numel()}")
        with _disable_current_modes():
            told = state.numpy().tobytes()
            if told in self.states:
                super().set_state(self.states[told])
            else:
                super().manual_seed(struct.unpack_from("<Q", told)[0])
        return self

    def get_offset(self) -> int:
        """Return how far it is past its seed; 0, as the CPU's generators do not count."""
        return 0

    def set_offset(self, offset: int) -> CardGenerator:
        """Take an offset; the CPU's generators start at the seed for every one."""
        self.manual_seed(self.initial_seed())
        return self

    def clone_state(self) -> CardGenerator:
        """Return another generator in the same state."""
        other = card_generator(self.index)
        other.states = self.states
        return other.set_state(self.get_state())

    graphsafe_get_state = clone_state

    def __deepcopy__(self, memo: dict[int, Any]) -> CardGenerator:
        return self.clone_state()

    def graphsafe_set_state(self, other: CardGenerator) -> CardGenerator:
        """Take the state of another generator."""
        self.states |= other.states
        return self.set_state(other.get_state())


def card_generator(index: int) -> CardGenerator:
    """Return a new generator of a card."""
    generator = CardGenerator(device="cpu")
    generator.index = index
    generator.states = {}
    return generator


class Generator(_HostGenerator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """Stands in for ``torch.Generator``: a card's generator for CUDA, else torch's own."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Return a generator on ``device``, a name, an index of a card or a ``torch.device``."""
        place = torch.device(device)
        return card_generator(checked(place.index or 0)) if place.type == "cuda" else _HostGenerator(device=place)
