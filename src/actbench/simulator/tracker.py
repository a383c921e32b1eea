"""Bytes of the storages that are alive, real or fake, tracked while operators run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from actbench import livememory
from actbench.measuring.meters import footprint
from actbench.measuring.meters.peak import Communicated, Event
from actbench.measuring.meters.stepevents import HostEvent
from actbench.ops.simulation import plain_tensors
from actbench.simulator import hiddenmemory
from actbench.simulator.caching import round_up
from actbench.simulator.cachingmode import asks_device, tensors_of
from actbench.simulator.cublas import NONE, Workspaces
from actbench.simulator.fake import asks_for_device
from actbench.simulator.inplace import InPlace
from actbench.simulator.operators import composite
from actbench.simulator.places import is_on_card
from actbench.simulator.products import OF_MATRICES

Temporaries = Callable[[Any, tuple[Any, ...], Any], int]
"""From an operator, its arguments and its result to the bytes that it also needs while it runs."""

Observe = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]

Made = Callable[[int, Any], None]
"""Receives the name of a new storage and the operator that made it; None for an older storage."""

_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")


class Mark(NamedTuple):
    """A moment: the events and the names until then, and the bytes alive."""

    events: int
    names: int
    live_bytes: int


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds a storage's bytes when an operator first returns it, and subtracts them when it dies.

    It refers to no tensor and no storage, so it does not change their lifetimes. Views are free, and a storage that an
    operator resizes is counted anew. ``temporaries`` gives what an operator allocates and frees before it returns.
    On a CPU it counts what torch's allocator makes, as a trace of it does: not the memory of numpy and of files, which
    torch cannot resize.

    Args:
        rounding: The bytes of a storage are rounded up to a multiple of this: the block size of the allocator.
        host_is_free: Leave out storages in host memory: those of tensors that are not on a card.
        temporaries: Bytes that an operator needs while it runs.
        workspaces: What products of matrices allocate for libraries.
        observe: Called with each operator that has run, its arguments and its result.
        made: Called with each new storage, temporaries included.

    Attributes:
        events: All that was allocated and freed, in order; no two storages have one name, dead ones included, so that a
            part of the events can be played again.
        peak_at: How many events there were when the peak was reached.
        host: The same of storages in host memory that are left out.
        communicated: What collectives read and write, and what FSDP2 gathers.
        workspaces: Names of the workspaces that stay.
    """

    # without it torch refuses higher-order operators, such as flex attention, under a mode
    supports_higher_order_operators = True
    real_form: Callable[[Any], Callable[..., Any] | None] = staticmethod(lambda func: None)
    """Tells the real form of a custom operator, which is run on the card in its place."""

    def __init__(
        self,
        *,
        rounding: int = 1,
        host_is_free: bool = False,
        temporaries: Temporaries = lambda func, args, result: 0,
        workspaces: Workspaces = NONE,
        observe: Observe | None = None,
        made: Made = lambda name, func: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live_bytes = 0
        self._peak_bytes = 0
        self.peak_at = 0
        self.events: list[Event] = []
        self.host: list[HostEvent] = []
        self._replacement: tuple[weakref.ref[torch.UntypedStorage], Any, bool] | None = None
        self._in_place = InPlace()
        self.rounding = rounding
        self.host_is_free = host_is_free
        self._temporaries = temporaries
        self._workspaces, self._kept = workspaces, set[str]()
        self.workspaces: set[int] = set()
        self._observe = observe
        self._made = made
        self._known: dict[int, Event] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._on_host: set[int] = set()
        self._names = 0
        self.communicated = Communicated()
        self._hidden = ExitStack()
        self._live = livememory.listening()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hidden.enter_context(hiddenmemory.reported(self._resized, self._count_states))
        return self

    def __exit__(self, *error: Any) -> None:
        self._hidden.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation: nothing is compiled while storages are tracked."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its result; for a tensor subclass, count the operators that its class runs.

        In inference mode, and of an operator on functions, those that it is composed of are counted.
        """
        if asks_device(func, args):  # as autograd does twice for each operator
            self._settle()
            return args[0].device
        if isinstance(func, HigherOrderOperator) or torch.is_inference_mode_enabled() or self.real_form(func):
            made = self._composed(func, args, kwargs or {})
            if made is not NotImplemented:
                return made
        if any(kind is not FakeTensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the tensor's class then runs operators, which come here
        self._settle()
        result = func(*args, **(kwargs or {}))
        if func in OF_MATRICES:
            # the id is -1 outside of backward passes
            in_backward = torch._C._current_graph_task_id() >= 0
            self._keep(self._workspaces.kept_by(func, args, kwargs or {}, result, in_backward=in_backward))
        hiddenmemory.leave(func, args, result)
        if self._observe is not None:
            self._observe(func, args, kwargs or {}, result)
        found = tensors_of(result)
        if self._in_place.replaces(func, args):
            self._replacement = weakref.ref(result.untyped_storage()), func, self.leaves_out(result)
            return result
        self._in_place.note(func, result)
        # behind what resizes storages: they are counted as they then are
        self.add(found, func)
        if func.namespace in _COLLECTIVES:
            self.communicated.note(self.names, func, args, kwargs or {}, found)
        if not (self.host_is_free and on_host(args, kwargs or {}, found)):
            worked_in = self._workspaces.product_bytes(func, args, kwargs or {}, result)
            self._enter_temporaries((self._temporaries(func, args, result), worked_in), func)
        return result

    def _composed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operators that an operator is composed of; NotImplemented if it is not."""
        # a mode is off while its own __torch_dispatch__ runs
        with self:
            if isinstance(func, HigherOrderOperator):
                # torch registers the eager form of higher-order operators under this key
                return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
            form = self.real_form(func)
            if form is not None and any(map(is_on_card, tensors_of((args, kwargs)))):
                return form(*args, **kwargs)
            kernel = composite(func) or func.decompose
            is_whole = func.namespace != "aten" or not torch.is_inference_mode_enabled()
            return NotImplemented if is_whole else kernel(*args, **kwargs)

    def keep_workspaces(self) -> None:
        """Count the workspaces of cuBLAS that stay, those of both passes, from now on."""
        self._keep(self._workspaces.kept)

    def _keep(self, sizes: Mapping[str, int]) -> None:
        """Count the workspaces of these names and sizes, of which each stays from the first product on."""
        for name, size in sizes.items():
            if name not in self._kept:
                self._kept.add(name)
                self.workspaces.add(label := self._name())
                self.events.append((label, size))
                self._live_bytes += size
                self._raise_peak()

    def _settle(self) -> None:
        """Count a replacement when the replaced tensor is freed, if that has no other reference."""
        if self._replacement is None:
            return
        (storage, func, place), self._replacement = self._replacement, None
        if (alive := storage()) is not None:
            self._enter(alive, func, place)
            self._raise_peak()

    def add(self, tensors: Iterable[Tensor], func: Any = None) -> None:
        """Count the storages of tensors that ``func`` made (None: older ones), or that have moved."""
        for tensor in plain_tensors(*tensors):
            storage = tensor.untyped_storage()
            if self.host_is_free:
                known = self._known.get(id(storage))
                self._enter(storage, func, known[0] in self._on_host if known else not is_on_card(tensor))
            elif storage.resizable():
                self._enter(storage, func, False)
        self._raise_peak()
        if self._live is not None:  # what waits to be counted waits on
            self._live.look(self._live_bytes, self._peak_bytes, self._known.values)

    def names(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the names in ``events`` of the known storages of tensors."""
        return self.names_of(footprint.storages(tensors))

    def names_of(self, storages: Iterable[torch.UntypedStorage]) -> set[int]:
        """Return the names in ``events`` of known storages."""
        return self.names_by_id(map(id, storages))

    def names_by_id(self, ids: Iterable[int]) -> set[int]:
        """Return the names in ``events`` of known storages, which are alive, by their ids."""
        self._settle()
        return {self._known[key][0] for key in ids if key in self._known}

    def storages(self) -> Iterable[Event]:
        """Return the names and the bytes of the known storages that are alive, of host memory with no bytes."""
        self._settle()
        return self._known.values()

    @property
    def live_bytes(self) -> int:
        """Bytes of the known storages that are alive."""
        self._settle()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest ``live_bytes`` since the last :meth:`reset_peak`, temporaries included."""
        self._settle()
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Begin a new peak at the bytes alive now."""
        self._peak_bytes = self.live_bytes
        self.peak_at = len(self.events)

    def mark(self) -> Mark:
        """Return this moment."""
        return Mark(len(self.events), self._names, self._live_bytes)

    def repeat(self, before: Mark, begun: Mark, ended: Mark, times: int) -> Sequence[int]:
        """Copy the events between ``begun`` and ``ended`` ``times`` times, and put the copies in front of them.

        The events between ``before`` and ``begun`` must be the same. Each copy frees what the part in front of it left
        alive, and the copied events then free what the last copy left. What all copies leave is added to a peak that
        the copied events reached. Returns the first name of each copy.
        """
        events = self.events[begun.events : ended.events]
        width, grown = ended.names - begun.names, ended.live_bytes - begun.live_bytes
        firsts = range(self._names, self._names + times * width, width)
        self._names += times * width
        copies: list[Event] = []
        previous = before.names
        for first in (*firsts, begun.names):
            for name, amount in events:
                # names of before the first micro-batch are of what all of them share
                shift = first - begun.names if name >= begun.names else previous - before.names
                copies.append((name + shift if name >= before.names else name, amount))
            previous = first
        self.events[begun.events : ended.events] = copies
        self._live_bytes += times * grown
        if self.peak_at > begun.events:
            self._peak_bytes, self.peak_at = self._peak_bytes + times * grown, self.peak_at + times * len(events)
        return firsts

    def _count_states(self, states: list[Tensor]) -> None:
        if not self.host_is_free:
            self.add(states)

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory that is not counted."""
        return self.host_is_free and not any(map(is_on_card, plain_tensors(tensor)))

    def _name(self) -> int:
        self._names += 1
        return self._names - 1

    def _enter_temporaries(self, amounts: Sequence[int], func: Any) -> None:
        """Count blocks that an operator holds together and frees before it returns."""
        self.events += (entered := [(self._name(), amount) for amount in amounts if amount])
        for name, _ in entered:
            self._made(name, func)
        self._raise_peak(sum(amounts))
        self.events += [(name, 0) for name, _ in reversed(entered)]

    def _raise_peak(self, temporary_bytes: int = 0) -> None:
        if self._live_bytes + temporary_bytes > self._peak_bytes:
            self._peak_bytes, self.peak_at = self._live_bytes + temporary_bytes, len(self.events)

    def _enter(self, storage: torch.UntypedStorage, func: Any, free: bool) -> None:
        key = id(storage)  # torch keeps one Python object for each storage while it lives
        if key not in self._known:
            # a weak reference alone: a strong one would keep alive what it is to see die
            self._watched[key] = weakref.ref(storage, lambda _: self._leave(key))
            self._known[key] = (self._name(), 0)
            self._made(self._known[key][0], func)
        amount = 0 if free else round_up(storage.nbytes(), self.rounding)
        name, before = self._known[key]
        self._known[key] = (name, amount)
        if free and name not in self._on_host:
            self._on_host.add(name)
            self.host.append(HostEvent(len(self.events), name, storage.nbytes()))
        if amount != before:
            self._live_bytes += amount - before
            self.events.append((name, amount))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew that was freed or allocated again while tensors hold it, as FSDP2 does."""
        self._settle()
        key = id(storage)
        if key not in self._known:
            return
        name, before = self._known[key]
        free = name in self._on_host
        if before and not storage.nbytes():
            self.events.append((name, 0))
            self._live_bytes -= before
        # under a new name: a later part of the events must not free what an earlier one did
        if not storage.nbytes() or not before:
            self._known[key] = (self._name(), 0)
        if storage.nbytes():
            self._made(self._known[key][0], None)
            self._enter(storage, None, free)
            self._raise_peak()

    def _leave(self, key: int) -> None:
        del self._watched[key]
        name, amount = self._known.pop(key)
        self._live_bytes -= amount
        if amount:
            self.events.append((name, 0))
        if name in self._on_host:
            self._on_host.remove(name)
            self.host.append(HostEvent(len(self.events), name, 0))


class CheckedTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """A tracker that can raise where memory runs out."""

    check: Callable[[], object] = staticmethod(lambda: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.check()
        return result


class OnCard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a tracker and modes see operators on tensors of the card, and those that make such; others run for real.

    It is for what runs outside of these modes: threads, and code for which they are off. Without modes, as on a CPU, it
    lets the tracker see all operators.
    """

    def __init__(self, tracker: StorageTracker, modes: Sequence[TorchDispatchMode] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker, self._modes = tracker, modes
        self.ignore_compile_internals = tracker.ignore_compile_internals  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_of((args, kwargs)))
        if self._modes and not (is_fake or asks_for_device((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            return self._tracker.__torch_dispatch__(func, types, args, kwargs)


def on_host(args: Any, kwargs: Any, found: Sequence[Tensor]) -> bool:
    """Return whether an operator makes ``found``, its results, in host memory: if none, where its arguments are."""
    return not any(map(is_on_card, found or tensors_of((args, kwargs))))
