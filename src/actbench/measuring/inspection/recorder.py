"""One training forward on fake tensors, watched by a recorder, and which module of a model runs."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from actbench import slowsteps
from actbench.errors import UntraceableError
from actbench.model.ledger import OUTSIDE
from actbench.packing import savedtensors
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import card, fake
from actbench.simulator.cachingmode import asks_device, tensors_of
from actbench.simulator.opcache import layout_of
from actbench.workload.base import moved

Around = Callable[[str], Callable[[], object]]
"""Called with the path of a module that begins to run; returns a function to call when the module ends."""


class RunningModules:
    """Follows which module runs, by hooks on all modules, or on those at ``paths``.

    Attributes:
        calls: How often each module ran so far, by path.
    """

    def __init__(
        self, module: nn.Module, around: Around | None = None, *, paths: Collection[str] | None = None
    ) -> None:
        named = module.named_modules()
        self._modules = {path: each for path, each in named if paths is None or path in paths}
        self.calls = dict.fromkeys(self._modules, 0)
        self._around = around or (lambda path: lambda: None)
        self._active: list[tuple[str, Callable[[], object]]] = []
        # autograd counts nodes per thread; recomputation in the backward pass on a GPU runs in another thread
        self._turns: defaultdict[int, list[tuple[int, str]]] = defaultdict(lambda: [(0, OUTSIDE)])
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules inside the block, whose thread runs forward passes; remove the hooks at the end."""
        self._thread = threading.get_ident()
        with ExitStack() as handles:
            for path, child in self._modules.items():
                enter = child.register_forward_pre_hook(partial(self._enter, path), prepend=True)
                handles.callback(enter.remove)
                leave = child.register_forward_hook(self._leave, always_call=True)
                handles.callback(leave.remove)
            yield

    @property
    def running(self) -> str:
        """The path of the module whose forward pass runs; :data:`~actbench.model.ledger.OUTSIDE` if none runs."""
        return self._active[-1][0] if self._active else OUTSIDE

    def made_node(self, sequence_number: int) -> str:
        """Return the path of the module whose forward pass made a node of autograd's graph, in its thread."""
        turns = self._turns[self._thread]
        return turns[bisect_right(turns, sequence_number, key=lambda turn: turn[0]) - 1][1]

    def _enter(self, path: str, *_: Any) -> None:
        self._active.append((path, self._around(path)))
        self._note_turn()
        self.calls[path] += 1

    def _leave(self, *_: Any) -> None:
        self._active.pop()[1]()
        self._note_turn()

    def _note_turn(self) -> None:
        self._turns[threading.get_ident()].append((torch._C._autograd._get_sequence_nr(), self.running))


@dataclass(frozen=True)
class SavedStorage:
    """A storage that lives from forward to backward, with the path of the module that saved it first.

    ``shared_with`` are the paths of other modules that saved it; to free it, all of them must change.
    """

    nbytes: int
    owner: str
    shared_with: tuple[str, ...]


@dataclass
class StorageOrigin:
    """The module and operator that made a storage, its first tensor and its place, and the modules that saved it."""

    maker: str
    operator: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    savers: list[str] = field(default_factory=list)


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes storages as operators make them, the modules that save them, and the running module; keeps nothing alive.

    Attributes:
        modules: Follow which module runs.
        calls: How often each module ran so far, by path.
        acted: Pairs of a module's path and the ``by`` of :func:`actbench.packing.savedtensors.acted`.
    """

    def __init__(self, module: nn.Module, known: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = RunningModules(module)
        self.calls = self.modules.calls
        self.acted: set[tuple[str, Hashable]] = set()
        self._is_on_card = any(parameter.is_cuda for parameter in module.parameters())
        self._old: WeakKeyDictionary[UntypedStorage, str] = WeakKeyDictionary()
        for kind, tensors in known.items():
            for storage in _storages(tensors):
                self._old.setdefault(storage, kind)
        self._made: WeakKeyDictionary[UntypedStorage, StorageOrigin] = WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A storage first seen as an input is older than the forward pass: a constant that is neither parameter
        # nor buffer. The operator may return a view of it.
        for storage in _storages((args, kwargs)):
            if storage not in self._made:
                self._old.setdefault(storage, "made before the step")
        if asks_device(func, args):
            return args[0].device
        outputs = func(*args, **(kwargs or {}))
        for tensor in _tensors(outputs):
            storage = tensor.untyped_storage()
            if storage not in self._old and storage not in self._made:
                self._made[storage] = StorageOrigin(self._running, str(func), tensor.shape, tensor.dtype, tensor.device)
        return outputs

    def saved(self, tensor: Tensor) -> Tensor:
        """Note that the running module saves a tensor for backward; this is the pack hook."""
        for storage in _storages(tensor):
            origin = self._made.get(storage)
            if origin is not None and self._running not in origin.savers:
                origin.savers.append(self._running)
        return tensor

    def acts(self, by: Hashable) -> None:
        """Note that ``by`` acts in the running module."""
        self.acted.add((self._running, by))

    def kept(self) -> tuple[SavedStorage, ...]:
        """Return the storages that are alive now, except those in host memory."""
        return tuple(
            SavedStorage(
                storage.nbytes(), owner=(origin.savers or [origin.maker])[0], shared_with=tuple(origin.savers[1:])
            )
            for storage, origin in self.made()
            if not self.is_on_host(storage)
        )

    def made(self) -> Iterator[tuple[UntypedStorage, StorageOrigin]]:
        """Yield the storages that are alive now, also those in host memory, in the order of their creation."""
        yield from self._made.items()

    def is_on_host(self, storage: UntypedStorage) -> bool:
        """Return whether the forward pass of a model on a card made a storage in host memory."""
        origin = self._made.get(storage)
        return self._is_on_card and origin is not None and origin.device.type == "cpu"

    def saw(self, storage: UntypedStorage) -> bool:
        """Return whether an operator took or made a storage; storages of numbers never reach an operator."""
        return storage in self._made or storage in self._old

    def known_as(self, storage: UntypedStorage) -> str | None:
        """Return the kind of a storage that is older than the forward pass; None for one that the pass made."""
        return self._old.get(storage)

    def maker_of(self, node: Node) -> str:
        """Return the path of the module that made a node of autograd's graph, in this thread."""
        return self.modules.made_node(node._sequence_nr())

    @property
    def _running(self) -> str:
        return self.modules.running


def _storages(tree: Any) -> list[UntypedStorage]:
    return [tensor.untyped_storage() for tensor in _tensors(tree)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tensors_of(tree) if layout_of(leaf) is torch.strided]


@contextmanager
def traced(setup: TrainingSetup, make_batch: Callable[[], Batch]) -> Iterator[tuple[StorageRecorder, Tensor]]:
    """Run one training forward of a setup on fake tensors; what it saves lives as long as the context.

    If the batch is cut, the first micro-batch runs, which is the largest.

    The model, on any device, keeps its weights, flags and random state: parameters and buffers are fake during the
    call, unless they were fake before. ``make_batch`` is called with the fake tensor mode active.

    Yields:
        The recorder, and the loss with its graph.

    Raises:
        UntraceableError: The forward pass needs values, which fake tensors do not have, or a scheme cannot be traced.
    """
    if setup.limits.untraceable:
        raise UntraceableError(setup.limits.untraceable)
    module = setup.module
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(mode_set(module, training=True))
        mode = fake.mode_of(module)
        if mode is None:
            mode = fake.fake_mode()
            stack.enter_context(fake.faked(module, mode, card.place()))
        stack.enter_context(mode)
        batch, device = make_batch(), next((p.device for p in module.parameters()), None)
        batch = setup.cast(batch if device is None else moved(batch, device))
        known = {"parameter": list(module.parameters()), "buffer": list(module.buffers()), "batch": dict(batch)}
        recorder = StorageRecorder(module, known)
        with slowsteps.followed(module.parameters()):
            loss = _run(setup, setup.cut(batch)[0].batch, recorder)
        yield recorder, loss


def _run(setup: TrainingSetup, batch: Batch, recorder: StorageRecorder) -> Tensor:
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda tensor: tensor)
    observing = savedtensors.observing(recorder.acts)
    with fake.shapes_only(), recorder.modules.watching(), torch.enable_grad(), recorder, hooks, observing:
        return setup.forward(batch)


@contextmanager
def mode_set(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode inside the block, and restore every module's flag."""
    flags = {child: child.training for child in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for child, flag in flags.items():
            child.training = flag
