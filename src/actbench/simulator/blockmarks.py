"""Where the blocks of a model begin and end in a simulated step, and what each of them holds and takes there."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from actbench.measuring.meters.footprint import storages
from actbench.measuring.meters.peak import Event, alive
from actbench.model.blocks import BlockReading, BlockReadings
from actbench.packing.blocks import blocks, repeated
from actbench.simulator.caching import round_up
from actbench.simulator.cost.recorder import Done, Recorder
from actbench.simulator.segments import Part, Place, events_between, on_host, parts_between
from actbench.simulator.trace import BEFORE, HOST, Label, Segment, Trace, labels_of
from actbench.simulator.tracker import StorageTracker

_autograd: Any = torch._C._autograd


class Block(NamedTuple):
    """A block of a model before schemes: its path, and what equal blocks have in common but their inputs."""

    path: str
    form: str


def found(model: nn.Module) -> list[Block]:
    """Return the blocks of a model: those of classes that are known to be blocks, or else what it repeats."""
    return [Block(path, _form(module)) for path, module in blocks(model) or repeated(model)]


def _form(module: nn.Module) -> str:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return f"{type(module).__qualname__} {[(name, *_shape(tensor)) for name, tensor in tensors]}"


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


@dataclass
class _Run:
    """One run of a block.

    Attributes:
        entered: When its forward pass begins.
        first_node: Number of the first node that it adds to autograd's graph.
        given: What goes in first, while it is alive: what the block before returned.
        given_bytes: Its bytes.
        waits: How many blocks had begun when it was last seen alive at such a moment.
        is_held: Whether it is alive after the forward pass.
        took: Names of storages that go in.
        saved: Names of storages that its part of autograd's graph saves as they are.
        returned: Names of storages that it returns, those left out that it was given.
        left: When its forward pass ends.
        backward: When its backward pass begins.
    """

    block: Block
    kind: str
    entered: Place
    first_node: int
    given: weakref.ref[UntypedStorage] | None
    given_bytes: int
    waits: int = 0
    left: Place | None = None
    backward: Place | None = None
    output_bytes: int = 0
    keeps_output: bool = False
    keeps_input: bool = False
    is_held: bool = False
    took: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    returned: tuple[int, ...] = ()

    @property
    def is_alive(self) -> bool:
        """Whether what went in is alive."""
        return self.given is not None and self.given() is not None


@dataclass
class _Pass:
    """The pass of one micro-batch through the model and back.

    Attributes:
        runs: The blocks, as they run.
        forwarded: When the forward pass ends.
        stem: When the backward pass of what made the first block's input begins.
        is_chain: Whether each block ran once, none within another, and all with a graph.
    """

    begun: Place
    runs: list[_Run] = field(default_factory=list)
    forwarded: Place | None = None
    stem: Place | None = None
    ended: Place | None = None
    is_chain: bool = True


class BlockMarks:
    """Marks where blocks begin and end among the events and operators of a step; the last micro-batch counts.

    The backward pass of a block begins where the first of the nodes runs that made what it returned.

    Attributes:
        passed: Seconds until the device has come past each operator, if they are estimated.
        state_bytes: Optimizer state that the passes ran without.
        cyclic_bytes: Bytes that the optimizer's step needs beyond its events.
        updates: When the optimizer's first step begins, and its second one.
        micro_batches: How many micro-batches the step has.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[Block], tracker: StorageTracker, recorder: Recorder) -> None:
        modules = dict(module.named_modules())
        # schemes may have wrapped or renamed what the paths name; then no block is marked, rather than some of them
        all_there = all(block.path in modules for block in blocks)
        self._modules = [(block, modules[block.path]) for block in blocks] if all_there else []
        self._tracker, self._recorder = tracker, recorder
        self._pass: _Pass | None = None
        self.passed: list[float] = []
        self.state_bytes = self.cyclic_bytes = 0
        self.updates = (Place(0, 0), Place(0, 0))
        self.micro_batches = 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark what runs inside the block."""
        with ExitStack() as handles:
            for block, module in self._modules:
                # the first of the hooks, so that what the hooks of schemes allocate counts for the block
                enter = module.register_forward_pre_hook(partial(self._enter, block), with_kwargs=True, prepend=True)
                handles.callback(enter.remove)
                leave = module.register_forward_hook(partial(self._leave, block), with_kwargs=True)
                handles.callback(leave.remove)
            yield

    def turn(self) -> None:
        """A forward pass begins or ends."""
        if not self._modules:
            return
        if self._pass is None or self._pass.forwarded is not None:
            self._pass = _Pass(self._place())
            return
        self._pass.forwarded = self._place()
        keeps_output = False
        for run in self._pass.runs:
            run.is_held = run.is_alive
            # what a block is given counts once: as kept output, where the block before keeps it anyway
            run.keeps_input = run.keeps_input or (run.is_held and not keeps_output)
            keeps_output = run.keeps_output

    def updating(self) -> None:
        """The optimizer's first or second step begins."""
        self.updates = self.updates[1], self._place()

    def ended(self) -> None:
        """The backward pass has ended."""
        if self._pass is not None:
            self._pass.ended = self._place()

    def readings(self) -> BlockReadings | None:
        """Return what each block holds and takes; None where the blocks are no chain, or there are none."""
        if self._pass is None or not self._pass.runs or not self._pass.is_chain:
            return None
        return _readings(self._pass, self._tracker.events, self.passed, self.state_bytes)

    def trace(self) -> Trace | None:
        """Return the step as a value; None where the blocks are no chain, or there are none."""
        return self._traced(self._place(), self._recorder.done)

    def _traced(self, ended: Place, operators: Sequence[Done]) -> Trace | None:
        """Return as a value the step that ended at a place, with these operators."""
        if self._pass is None or not self._pass.runs or not self._pass.is_chain:
            return None
        places, runs, tracker = _places(self._pass), self._pass.runs, self._tracker
        if places is None or self._pass.forwarded is None:
            return None
        ends = [*places[:-1], *self.updates, ended]
        segments, known = dict[Label, Segment](), dict[Done, int]()
        for label, (first, last) in zip(labels_of(len(runs)), itertools.pairwise([Place(0, 0), *ends]), strict=True):
            taken = tuple(events_between(first, last, tracker.events, tracker.host))
            done = operators[first.done : last.done]
            if label == BEFORE:
                # of what ran before the pass, later segments need only what is still alive
                taken, done = tuple(alive(taken).items()), []
            segments[label] = Segment(taken, tuple(known.setdefault(each, len(known)) for each in done))
        streams = {**tracker.communicated.streams, **{on_host(event.name): HOST for event in tracker.host}}
        names = {name for segment in segments.values() for name, _ in segment.events}
        return Trace(
            blocks=tuple(run.block.path for run in runs),
            kinds=tuple(run.kind for run in runs),
            segments=segments,
            streams={name: stream for name, stream in streams.items() if name in names},
            given=tuple(tuple(sorted(run.took)) for run in runs),
            saved=tuple(tuple(sorted(run.saved)) for run in runs),
            returned=tuple(run.returned for run in runs),
            keeps_input=tuple(run.keeps_input for run in runs),
            operators=tuple(known),
            forwarded=len([*events_between(ends[len(runs) + 1], self._pass.forwarded, tracker.events, tracker.host)]),
            state_bytes=self.state_bytes,
            cyclic_bytes=self.cyclic_bytes,
            micro_batches=self.micro_batches,
        )

    def _place(self) -> Place:
        return Place(len(self._tracker.events), len(self._recorder.done), len(self._tracker.host))

    def _running(self) -> _Pass | None:
        """Return the pass whose forward pass runs; None in a backward pass, which may run a block again."""
        return None if self._pass is None or self._pass.forwarded is not None else self._pass

    def _enter(self, block: Block, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        running = self._running()
        if running is None:
            return
        is_next = all(run.block != block and run.left is not None for run in running.runs)
        # re-entrant checkpointing runs a block without a graph, so that nothing tells where its backward pass begins
        running.is_chain = running.is_chain and is_next and torch.is_grad_enabled()
        given = _tensors((args, dict(kwargs)))
        text = f"{block.form} {[_shape(tensor) for tensor in given]}"
        first = next((tensor for tensor in given if tensor.is_floating_point()), None)
        if not running.runs:
            self._hook(first, partial(self._reach_stem, running))
        storage = None if first is None else first.untyped_storage()
        # torch keeps the Python object of a storage as long as the storage lives, so that a weak reference tells
        held = None if storage is None else weakref.ref(storage)
        size = 0 if storage is None else round_up(storage.nbytes(), self._tracker.rounding)
        for run in running.runs:
            run.waits = len(running.runs) + 1 if run.is_alive else run.waits
        # the same digest in every process, which hash() of a string is not
        kind = hashlib.sha256(text.encode()).hexdigest()[:16]
        running.runs.append(_Run(block, kind, self._place(), _autograd._get_sequence_nr(), held, size))
        running.runs[-1].took = frozenset(self._tracker.names_of(storages(given)))

    def _leave(self, block: Block, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        running = self._running()
        if running is None or not running.is_chain:
            return
        run = running.runs[-1]
        run.left = self._place()
        given = {id(storage) for storage in storages(_tensors((args, dict(kwargs))))}
        made = _tensors(output)
        returned = [storage for storage in storages(made) if id(storage) not in given]
        run.output_bytes = sum(round_up(storage.nbytes(), self._tracker.rounding) for storage in returned)
        for tensor in made:
            self._hook(tensor, partial(self._reach, run))
        # nodes are numbered in the order in which a thread makes them, so those from here on are the block's
        kept = _saved_raw([tensor.grad_fn for tensor in made], run.first_node)
        run.keeps_output = any(id(storage) in kept for storage in returned)
        first = None if run.given is None else run.given()
        run.keeps_input = id(first) in kept
        run.saved = frozenset(self._tracker.names_by_id(kept))
        run.returned = tuple(name for storage in returned for name in self._tracker.names_of([storage]))

    def _hook(self, tensor: Tensor | None, reached: Callable[[], object]) -> None:
        """Call a function when the backward pass comes to the node that made a tensor; nothing keeps the node."""
        if tensor is not None and tensor.grad_fn is not None:
            # what a prehook returns replaces the gradients: these functions return None
            tensor.grad_fn.register_prehook(lambda gradients: reached())

    def _reach(self, run: _Run) -> None:
        if run.backward is None:
            run.backward = self._place()

    def _reach_stem(self, running: _Pass) -> None:
        if running.stem is None:
            running.stem = self._place()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _places(found: _Pass) -> list[Place] | None:
    """Return where the parts of a pass end; None where its blocks do not run backward in the opposite order."""
    last = found.runs[-1].left
    if last is None or found.forwarded is None or found.ended is None:
        return None
    backward = [found.stem or found.ended]  # of a block that no gradient reaches nothing runs backward
    for run in found.runs:
        backward.append(run.backward or backward[-1])
    places = [found.begun, *(run.entered for run in found.runs), last, *reversed(backward), found.ended]
    in_order = all(one.events <= two.events and one.done <= two.done for one, two in itertools.pairwise(places))
    return places if in_order else None


def _readings(found: _Pass, events: Sequence[Event], passed: Sequence[float], state_bytes: int) -> BlockReadings | None:
    places = _places(found)
    if places is None:
        return None
    parts = parts_between(places, events, passed, state_bytes)
    count = len(found.runs)
    before, forward, top, back, end = parts[0], parts[1 : count + 1], parts[count + 1], parts[count + 2 : -1], parts[-1]
    waiting = [_waiting(found.runs, begun) for begun in range(1, count + 1)]
    return BlockReadings(
        blocks=tuple(itertools.starmap(_reading, zip(found.runs, forward, reversed(back), waiting, strict=True))),
        start_bytes=before.first_bytes,
        stem_peak_bytes=before.peak_bytes,
        top_peak_bytes=top.peak_bytes,
        end_peak_bytes=end.peak_bytes if found.stem else 0,
        stem_seconds=before.seconds,
        top_seconds=top.seconds,
        end_seconds=end.seconds,
    )


def _waiting(runs: Sequence[_Run], begun: int) -> int:
    """Return the bytes of inputs of earlier blocks that are alive when a block begins, and freed before the end."""
    return sum(run.given_bytes for run in runs[: begun - 1] if run.waits >= begun and not run.is_held)


def _reading(run: _Run, forward: Part, back: Part, waiting: int) -> BlockReading:
    return BlockReading(
        path=run.block.path,
        kind=run.kind,
        before_bytes=forward.first_bytes,
        after_bytes=forward.last_bytes,
        forward_peak_bytes=forward.peak_bytes,
        backward_peak_bytes=back.peak_bytes,
        done_bytes=back.last_bytes,
        forward_seconds=forward.seconds,
        backward_seconds=back.seconds,
        output_bytes=run.output_bytes,
        waiting_bytes=waiting,
        keeps_output=run.keeps_output,
        keeps_input=run.keeps_input,
    )


def _saved_raw(ends: Iterable[Node | None], first_node: int) -> set[int]:
    """Return the ids of storages that nodes save raw: those above ``ends``, with numbers from ``first_node`` on.

    Nothing is unpacked. A tensor that a hook packed does not count, and neither does one that a function of Python
    keeps as an attribute.
    """
    found: set[int] = set()
    for node in _nodes_above(ends, first_node):
        for name in _names_of_saved(type(node)):
            saved = getattr(node, name)
            for each in saved if isinstance(saved, tuple | list) else (saved,):
                if each.unpack_hook is None and isinstance(each.data, Tensor):
                    found.add(id(each.data.untyped_storage()))
    return found


def _nodes_above(ends: Iterable[Node | None], first_node: int) -> Iterator[Node]:
    # nodes are held, not their ids: torch makes the Python object of a node anew once nothing holds it
    waiting, seen = list(ends), set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node._sequence_nr() >= first_node:
            seen.add(node)
            yield node
            waiting += (earlier for earlier, _ in node.next_functions)


@cache
def _names_of_saved(kind: type[Any]) -> tuple[str, ...]:
    """Return the attributes of a kind of node that have what it saved."""
    # torch generates _raw_saved_NAME beside _saved_NAME, and only the latter unpacks (tools/autograd of torch)
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
