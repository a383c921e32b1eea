"""Random numbers of processes that share layers: alike where they compute the same, of their own where they do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.nn.tensorparallel.ranks import Ranks


class OwnNumbers:
    """Lets a process draw numbers and seeds of its own between :meth:`begin` and :meth:`end`.

    They follow from one number of the CPU's generator, which all processes draw, and from which process this is: what
    runs again from the same state of that generator, as checkpointing does, draws the same numbers.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before: list[tuple[torch.Generator, Tensor]] = []

    def begin(self, x: Tensor) -> None:
        """Draw own numbers from now on, on the CPU and the device of a tensor; nothing where that is fake."""
        self.end()
        if isinstance(x, FakeTensor):
            return
        common = int(torch.randint(2**48, (), device="cpu"))
        for generator in _generators(x.device):
            self._before.append((generator, generator.get_state()))
            generator.manual_seed(common * self._ranks.size + self._ranks.rank)

    def end(self) -> None:
        """Go on with the numbers that all processes draw."""
        for generator, state in self._before:
            generator.set_state(state)
        self._before = []

    def __deepcopy__(self, memo: Any) -> OwnNumbers:
        return memo.setdefault(id(self), type(self)(self._ranks))  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._ranks,)


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that what runs on a device draws from; seeds of packing are drawn on the CPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
