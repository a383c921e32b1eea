"""Notes, while a model runs, which storages its operators make and which of its modules save them for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actbench.hostmemory import is_host

OUTSIDE = "<outside>"  # owner of what the loss function keeps after the model has returned


@dataclass(frozen=True)
class Kept:
    """A storage that lives from forward to backward.

    Attributes:
        nbytes: Its size in bytes.
        owner: Path of the module that saved it first.
        shared_with: Paths of the other modules that saved it too; freeing it means changing them all.
    """

    nbytes: int
    owner: str
    shared_with: tuple[str, ...]


@dataclass
class _History:
    """Which module made a storage and which ones saved it, in order of time."""

    maker: str
    savers: list[str] = field(default_factory=list)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes storages as operators make them, who saves them, and which module is running; keeps none of them alive.

    Args:
        module: The model that will run.
        known: Tensors, in any nesting, that were there before and are not counted: weights, buffers, the batch.

    Attributes:
        calls: How often each module ran so far, by path.
    """

    def __init__(self, module: nn.Module, known: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = {path: 0 for path, _ in module.named_modules()}
        self._active: list[str] = []
        self._old: WeakSet[UntypedStorage] = WeakSet(_storages(known))
        self._made: WeakKeyDictionary[UntypedStorage, _History] = WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and note the storages it makes."""
        # A storage first seen as an input was there before the forward: a constant that is neither parameter
        # nor buffer, of which the operator may return a view.
        for storage in _storages((args, kwargs)):
            if storage not in self._made:
                self._old.add(storage)
        outputs = func(*args, **(kwargs or {}))
        for storage in _storages(outputs):
            if storage not in self._old:
                self._made.setdefault(storage, _History(self._running))
        return outputs

    def saved(self, tensor: Tensor) -> Tensor:
        """Note that the running module saves a tensor for backward; the pack hook."""
        for storage in _storages(tensor):
            history = self._made.get(storage)
            if history is not None and self._running not in history.savers:
                history.savers.append(self._running)
        return tensor

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Follow which module runs, by hooks around all others of the model that are removed at the end."""
        with ExitStack() as handles:
            for path, child in module.named_modules():
                enter = child.register_forward_pre_hook(partial(self._enter, path), prepend=True)
                handles.callback(enter.remove)
                leave = child.register_forward_hook(self._leave, always_call=True)
                handles.callback(leave.remove)
            yield

    def kept(self) -> tuple[Kept, ...]:
        """Return the storages that are alive now, except those that a scheme has moved to host memory."""
        return tuple(
            Kept(storage.nbytes(), owner=(history.savers or [history.maker])[0], shared_with=tuple(history.savers[1:]))
            for storage, history in self._made.items()
            if not is_host(storage)
        )

    def _enter(self, path: str, *_: Any) -> None:
        self._active.append(path)
        self.calls[path] += 1

    def _leave(self, *_: Any) -> None:
        self._active.pop()

    @property
    def _running(self) -> str:
        return self._active[-1] if self._active else OUTSIDE


def _storages(tree: Any) -> list[UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
