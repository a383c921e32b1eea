"""Bytes of the storages that are alive, real or fake, kept while operators run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actbench.hostmemory import is_host

Temporaries = Callable[[Any, tuple[Any, ...], Any], int]
"""From an operator, its arguments and its result to the bytes it needs on top of both while it runs."""


def round_up(amount: int, block: int) -> int:
    """Return the smallest multiple of ``block`` that is at least ``amount``."""
    return -(-amount // block) * block


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds a storage's bytes when an operator first returns it and takes them off when it dies.

    It holds no tensor and no storage itself, so what it watches lives exactly as long as without it. Storages and not
    tensors are counted, so views are free, and a storage that an operator resizes is counted anew. What an operator
    allocates and frees before it returns is not seen; ``temporaries`` says how much that is.

    Args:
        rounding: Every storage counts as the next multiple of this many bytes: the block size of the allocator.
        host_is_free: Leave out storages that lie in host memory (:func:`actbench.hostmemory.mark`).
        temporaries: Bytes that an operator needs while it runs; None counts results only.
    """

    def __init__(
        self, *, rounding: int = 1, host_is_free: bool = False, temporaries: Temporaries | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounding = rounding
        self._host_is_free = host_is_free
        self._temporaries = temporaries
        self._known: dict[int, int] = {}
        self._fresh: list[weakref.ref[torch.UntypedStorage]] = []
        self._live = 0
        self._peak = 0

    @property
    def live_bytes(self) -> int:
        """Bytes of the known storages that are alive."""
        self._settle()
        return self._live

    @property
    def peak_bytes(self) -> int:
        """The largest ``live_bytes`` since the last :meth:`reset_peak`, temporaries included."""
        self._settle()
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and enter what it returns."""
        self._settle()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf.untyped_storage())
        if self._temporaries is not None:
            self._peak = max(self._peak, self._live + self._temporaries(func, args, result))
        return result

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Enter the storages of tensors that were made before the ledger began, or whose place has changed."""
        for tensor in tensors:
            self._enter(tensor.untyped_storage())
        self._settle()

    def reset_peak(self) -> None:
        """Begin a new peak at what is alive now."""
        self._settle()
        self._peak = self._live

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._known:
            weakref.finalize(storage, self._leave, key).atexit = False
            self._fresh.append(weakref.ref(storage))
        self._charge(storage)

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in host memory that this ledger does not count."""
        return self._host_is_free and is_host(tensor.untyped_storage())

    def _charge(self, storage: torch.UntypedStorage) -> None:
        free = self._host_is_free and is_host(storage)
        amount = 0 if free else round_up(storage.nbytes(), self._rounding)
        self._live += amount - self._known.get(id(storage), 0)
        self._known[id(storage)] = amount

    def _leave(self, key: int) -> None:
        self._settle()
        self._live -= self._known.pop(key)

    def _settle(self) -> None:
        """Bring the peak up to date, once it is known which of the last operator's storages lie in host memory.

        A copy to host memory is marked as such only after the operator that made it.
        """
        fresh, self._fresh = self._fresh, []
        if self._host_is_free:
            for reference in fresh:
                if (storage := reference()) is not None:
                    self._charge(storage)
        self._peak = max(self._peak, self._live)
