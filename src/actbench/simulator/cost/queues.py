"""In which of a device's queues an operator runs, and for which collective it waits, by the tensors that it uses.

Fake tensors on a CPU have no streams. Who waits for whom shows in the storages: an operator that uses what a collective
writes waits for it, but for two that run behind it: what FSDP2 and DDP do with reduced gradients in the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from actbench.model.records import Phase
from actbench.simulator.cost.collectives import Collective

COPIES_IN: Final = "all_gather_copy_in"
"""The operator that copies the shards of FSDP2 together before they are gathered, while the device computes."""


class Turn(NamedTuple):
    """When an operator runs.

    Attributes:
        needs: Which collective of the step must be over, counted from 0; None where none must.
        is_beside: Whether it runs in the queue of collectives.
        is_free: Whether a collective uses only what that queue has written: parameters are gathered ahead.
    """

    needs: int | None = None
    is_beside: bool = False
    is_free: bool = False


IN_ORDER: Final = Turn()


@dataclass
class _Written:
    """A storage that is written in the queue of collectives."""

    storage: weakref.ref[torch.UntypedStorage]
    collective: int | None
    follows: bool


class Queues:
    """Remembers which storages collectives write."""

    def __init__(self) -> None:
        self._written: dict[int, _Written] = {}
        self._collectives = 0

    def clear(self) -> None:
        """Forget all: a step begins."""
        self._written.clear()
        self._collectives = 0

    def concern(self, name: str) -> bool:
        """Return whether :meth:`other` has to be asked when an operator of this name runs."""
        return bool(self._written) or name == COPIES_IN

    def collective(self, found: Collective, used: Iterable[Tensor], phase: Phase, *, is_waited_for: bool) -> Turn:
        """Enter a collective, which uses tensors, and return when it runs.

        With ``is_waited_for`` the program itself waits for its end; else an operator that uses the result waits.
        """
        tensors = list(used)
        is_free = all(self._find(tensor) is not None for tensor in tensors)
        reduces = found.kind in ("reduce-scatter", "all-reduce") and phase == "backward" and not is_waited_for
        self._mark(tensors, self._collectives, follows=reduces)
        self._collectives += 1
        return Turn(is_beside=True, is_free=is_free)

    def other(self, name: str, used: Iterable[Tensor], made: Iterable[Tensor], phase: Phase) -> Turn:
        """Return when an operator runs that is no collective; ``made`` are the tensors that it writes."""
        # FSDP2 runs it in a stream of its own (all_gather_copy_in_stream of FSDPCommContext)
        if name == COPIES_IN:
            self._mark(made, None, follows=False)
            return Turn(is_beside=True)
        tensors = list(used)
        waited = [each for each in map(self._find, tensors) if each is not None and each.collective is not None]
        if not waited:
            return IN_ORDER
        last = max(each.collective or 0 for each in waited)
        if phase == "backward" and all(each.follows for each in waited):
            self._mark(made, last, follows=True)
            return Turn(is_beside=True)
        # the device's queue is in order: whatever comes behind this operator need not wait again
        for tensor in tensors:
            self._written.pop(id(tensor.untyped_storage()), None)
        return Turn(needs=last)

    def _find(self, tensor: Tensor) -> _Written | None:
        storage = tensor.untyped_storage()
        found = self._written.get(id(storage))
        # the id may be that of a storage which has gone, and which another has taken
        return found if found is not None and found.storage() is storage else None

    def _mark(self, tensors: Iterable[Tensor], collective: int | None, *, follows: bool) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._written[id(storage)] = _Written(weakref.ref(storage), collective, follows)
