"""Random numbers of data: the same batches whether weights are drawn, or have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from actbench.tools.script.arrivals import rebound


class Draws:
    """A stream of random numbers for loading data, apart from the one that initializes weights and drops activations.

    Tensors without values draw no numbers. So a shuffled data set would come in another order than in a real run, and
    batches that are padded to their longest row would have other shapes. The stream begins anew where a script seeds.
    """

    def __init__(self) -> None:
        self._state = _state()

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Inside the block, let ``torch.manual_seed`` seed this stream too."""

        def seeding(own: Callable[[Any], torch.Generator]) -> Callable[[Any], torch.Generator]:
            def manual_seed(seed: Any) -> torch.Generator:
                generator = own(seed)
                self._state = _state()
                return generator

            return manual_seed

        with rebound(torch, "manual_seed", seeding):
            yield

    @contextmanager
    def own(self) -> Iterator[None]:
        """Inside the block, torch's default generator draws from this stream."""
        others = _state()
        _set(self._state)
        try:
            yield
        finally:
            self._state = _state()
            _set(others)


def _state() -> bytearray:
    """Return the state of torch's default generator, in memory that is not torch's: that of a script is counted."""
    return bytearray(torch.default_generator.get_state().numpy().tobytes())


def _set(state: bytearray) -> None:
    torch.default_generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
