"""Works of asynchronous collectives, and the tensors that NCCL's process group keeps for them.

Since torch 2.8 ``ProcessGroupNCCL`` holds the tensors of a collective with ``async_op=True`` until its work is waited
for. A future of the work, waited for in its place, makes the stream wait but lets go of nothing: a watchdog then sees,
every 100 ms, which works have ended, and the next collective frees their tensors. The processor enqueues about one step
ahead of the card unless it waits for it, so that two steps' tensors are held; without waiting for the works, gradients
that a script has dropped stay. Peaks in published logs of modded-nanogpt show it (docs/public-scripts.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.units import format_bytes


class Works:
    """What the works of asynchronous collectives hold, by the step that began them.

    Attributes:
        most_bytes: The most that was held at once, and by nothing else, for works that were never waited for.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._enqueued: list[Shelf] = []
        self._running: list[Shelf] = []
        self._ended: list[Shelf] = []

    def begin(self, tensors: Sequence[Tensor]) -> Shelf:
        """Begin a work, which frees what ended ones hold; return what holds the tensors of this one."""
        self.free()
        shelf = Shelf(tensors)
        self._enqueued.append(shelf)
        return shelf

    def end_step(self) -> None:
        """Let the card end the works of the step before this one."""
        self._ended += [shelf for shelf in self._running if shelf.tensors]
        self._running, self._enqueued = self._enqueued, []

    def _held_alone(self) -> int:
        """Return the bytes that nothing but works holds: buffers of DistributedDataParallel are alive anyway."""
        held: dict[int, dict[int, Tensor]] = {}
        for each in (tensor for shelf in (*self._ended, *self._running) for tensor in shelf.tensors):
            held.setdefault(each.untyped_storage()._cdata, {})[id(each)] = each
        sizes = 0
        for storage, tensors in held.items():
            # one more is that of Python's object of the storage
            if torch._C._storage_Use_Count(storage) <= len(tensors) + 1:
                sizes += next(iter(tensors.values())).untyped_storage().nbytes()
        return sizes

    def synchronize(self, *_: Any) -> None:
        """Let the card end all works, as what waits for it does; the next collective frees what they hold."""
        self._ended += self._running + self._enqueued
        self._running, self._enqueued = [], []

    def free(self) -> None:
        """Free what ended works hold, as each collective does."""
        if any(shelf.tensors for shelf in self._ended):
            self.most_bytes = max(self.most_bytes, self._held_alone())
        self._ended.clear()

    def remarks(self) -> Iterator[str]:
        """Yield what to change in a script whose works hold tensors."""
        if self.most_bytes:
            yield (
                "works of collectives with async_op=True are not waited for: they hold up to "
                f"{format_bytes(self.most_bytes)} until two steps later; call work.wait(), not only "
                "work.get_future().wait()"
            )


class Shelf:
    """The tensors that one work holds."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [*tensors]


class Work:
    """The work of a collective that is done; stands in for ``Work``, which has no results in a fake group."""

    def __init__(self, work: Any, results: list[Tensor], shelf: Shelf) -> None:
        self._work, self._results, self._shelf = work, results, shelf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, and free what is held."""
        self._shelf.tensors.clear()
        return self._work.wait(*args, **kwargs)

    def synchronize(self) -> None:
        """Let the stream wait, and free what is held."""
        self._shelf.tensors.clear()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that has the results; who waits for it frees nothing."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def result(self) -> list[Tensor]:
        """Return the results."""
        return self._results
