"""A simulated step as a value: what it allocates, frees and runs, cut where the blocks of a model begin and end.

A step of n blocks has the segments ``before``, ``start``, ``forward`` 0 to n - 1, ``top``, ``backward`` n - 1 to 0,
``end``, ``state`` and ``optimizer``. What is alive when the forward pass begins is allocated in ``before``. ``start``
is the forward pass until the first block, ``top`` all from the end of the last block until its backward pass, ``end``
what follows the backward pass of the first. The optimizer steps twice: ``state`` is the step that makes its state, and
``optimizer`` the one that every later step of training repeats. Of a script's step, which began with its state,
``state`` has nothing but the state.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

from actbench.errors import UsageError
from actbench.simulator.cost.collectives import Collective
from actbench.simulator.cost.queues import Turn
from actbench.simulator.cost.recorder import Done
from actbench.simulator.cost.work import OperatorWork

FORMAT: Final = 1
"""Version of the lines that a trace is written as."""

HOST: Final = "host"
"""The stream of storages in host memory, which are no part of the peak."""


class Label(NamedTuple):
    """Which segment of a step it is: its kind, and the block's number, -1 outside of blocks."""

    kind: str
    block: int = -1


BEFORE, START, TOP, END = Label("before"), Label("start"), Label("top"), Label("end")
STATE, OPTIMIZER = Label("state"), Label("optimizer")


def labels_of(blocks: int) -> list[Label]:
    """Return the labels of the segments of a step, in order."""
    forward = [Label("forward", number) for number in range(blocks)]
    backward = [Label("backward", number) for number in reversed(range(blocks))]
    return [BEFORE, START, *forward, TOP, *backward, END, STATE, OPTIMIZER]


class Segment(NamedTuple):
    """What happens in a segment.

    Attributes:
        events: Storages, each with its bytes from now on, which are 0 when it is freed.
        operators: Places of operators among those of the trace.
    """

    events: tuple[tuple[int, int], ...] = ()
    operators: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """One simulated step, of its last micro-batch.

    Attributes:
        blocks: Paths of the blocks in the order of the forward pass.
        kinds: Equal blocks have one kind.
        segments: By label, in order.
        streams: Of storages that are not allocated on the stream that computes; :data:`HOST` is host memory.
        given: Storages that each block is given.
        saved: Storages that each block's part of autograd's graph saves as they are.
        returned: Storages that each block returns, those left out that it was given.
        keeps_input: Whether each block keeps the first tensor that goes in as it is.
        gradients: Storages of gradients that an earlier micro-batch has left, or the step before.
        follows: Whether it follows another step, and begins with what that one has left.
        operators: All different operators, with the phase in which each runs.
        forwarded: How many events of the top belong to the forward pass.
        state_bytes: Optimizer state that exists while the passes run, though they were simulated without it.
        cyclic_bytes: Bytes that the optimizer's step needs beyond its events.
        micro_batches: How many micro-batches the step has.
        more_seconds: Time of the step beyond that of so many micro-batches like this one; below 0 where the first of
            several has no gradients to add to.
        expandable: Whether the segments of CUDA's allocator grow.
    """

    blocks: tuple[str, ...]
    kinds: tuple[str, ...]
    segments: Mapping[Label, Segment]
    streams: Mapping[int, str]
    given: tuple[tuple[int, ...], ...]
    saved: tuple[tuple[int, ...], ...]
    returned: tuple[tuple[int, ...], ...]
    keeps_input: tuple[bool, ...]
    operators: tuple[Done, ...]
    forwarded: int
    gradients: tuple[int, ...] = ()
    follows: bool = False
    state_bytes: int = 0
    cyclic_bytes: int = 0
    micro_batches: int = 1
    more_seconds: float = 0.0
    expandable: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the trace as lines of JSON: what holds for the whole step, then operators, segments and streams."""
        of_blocks = ("blocks", "kinds", "given", "saved", "returned", "keeps_input", "gradients")
        numbers = ("forwarded", "follows", "state_bytes", "cyclic_bytes", "micro_batches", "more_seconds", "expandable")
        yield _line({"trace": FORMAT, **{name: getattr(self, name) for name in (*of_blocks, *numbers)}})
        for done in self.operators:
            usual = asdict(OperatorWork(done.work.name))
            work = {name: value for name, value in asdict(done.work).items() if value != usual.get(name, None)}
            turn = {} if done.turn == Turn() else {"turn": list(done.turn)}
            named = {"name": done.work.name, **work}
            yield _line({"phase": done.phase, "on_host": done.on_host, "work": named, **turn})
        for label, segment in self.segments.items():
            block = {"block": label.block} if label.block >= 0 else {}
            yield _line({"segment": label.kind, **block, "events": segment.events, "operators": segment.operators})
        for stream in sorted(set(self.streams.values())):
            yield _line({"stream": stream, "storages": [name for name, on in self.streams.items() if on == stream]})

    @classmethod
    def of_lines(cls, lines: Iterable[str]) -> Trace:
        """Return the trace that was written as lines.

        Raises:
            UsageError: They are of another version, or of something else.
        """
        said: dict[str, Any] = {}
        operators, segments, streams = list[Done](), dict[Label, Segment](), dict[int, str]()
        for line in lines:
            found = json.loads(line)
            if "trace" in found:
                if found.pop("trace") != FORMAT:
                    raise UsageError(f"a trace of another version than {FORMAT} cannot be read")
                said = {name: _frozen(value) for name, value in found.items()}
            elif "work" in found:
                operators.append(_done(found))
            elif "segment" in found:
                label = Label(found["segment"], found.get("block", -1))
                segments[label] = Segment(_frozen(found["events"]), _frozen(found["operators"]))
            else:
                streams.update(dict.fromkeys(found["storages"], found["stream"]))
        if not said:
            raise UsageError("no trace: its first line is missing")
        return cls(segments=segments, streams=streams, operators=tuple(operators), **said)

    def packed(self) -> str:
        """Return the lines as short text, which a record holds."""
        return base64.b85encode(zlib.compress("\n".join(self.lines()).encode(), 6)).decode()

    @classmethod
    def unpacked(cls, text: str) -> Trace:
        """Return the trace of short text; a UsageError if it is of another version."""
        return cls.of_lines(zlib.decompress(base64.b85decode(text)).decode().splitlines())

    def repeated(self, blocks: Sequence[str], places: Sequence[int]) -> Trace | None:
        """Return the trace of a deeper model, each block of which does what the block at the given place does here.

        What a block takes over from its neighbour is what the block that stands for the neighbour leaves in its place:
        storages of as many bytes. None if that leaves another number of them.
        """
        try:
            return _Repeated(self, places).trace(blocks)
        except LookupError:
            return None

    def of_blocks(self) -> list[tuple[Label, list[tuple[tuple[Label, int], int]], list[Done]]]:
        """Return what blocks do with what they allocate themselves, and their operators."""
        keys = self.keys()
        return [
            (
                label,
                [(keys[name], amount) for name, amount in segment.events if keys[name][0].block == label.block],
                [self.operators[place] for place in segment.operators],
            )
            for label, segment in self.segments.items()
            if label.block >= 0
        ]

    def keys(self) -> dict[int, tuple[Label, int]]:
        """Return of each storage the segment that allocates it, and how many this segment allocates before it."""
        found: dict[int, tuple[Label, int]] = {}
        for label, segment in self.segments.items():
            count = 0
            for name, _ in segment.events:
                if name not in found:
                    found[name] = label, count
                    count += 1
        return found


class _Repeated:
    """A trace whose blocks are repeated: names of storages as seen from each block of the deeper model."""

    def __init__(self, trace: Trace, places: Sequence[int]) -> None:
        self._trace, self._places, self._keys = trace, places, trace.keys()
        self._names: dict[tuple[Label, int], int] = {}
        self._left: dict[tuple[Label, object], list[int]] = {}  # what segments leave, by what is equal in two blocks
        self._alike: dict[int, object] = {}
        sizes, freed = dict[int, int](), dict[int, Label]()  # by the passes; gradients of weights stay until the update
        for label, segment in trace.segments.items():
            for name, amount in segment.events:
                sizes[name] = max(sizes.get(name, 0), amount)
                freed.update({name: label} if not amount and label not in (STATE, OPTIMIZER) else {})
        for name, (label, _) in self._keys.items():
            is_returned = label.kind == "forward" and name in trace.returned[label.block]
            own = (label, Label("backward", label.block))  # what a block frees itself is nothing to its neighbours
            if label.block >= 0 and (is_returned or freed.get(name) not in own):
                self._alike[name] = is_returned or (sizes[name], name in freed, trace.streams.get(name))
                self._left.setdefault((label, self._alike[name]), []).append(name)

    def trace(self, blocks: Sequence[str]) -> Trace:
        trace, streams, segments = self._trace, dict[int, str](), dict[Label, Segment]()
        for label in labels_of(len(blocks)):
            if label.block >= 0:
                events, operators = trace.segments[label._replace(block=self._places[label.block])]
                ends = self._ends_row(label)
                renamed = [
                    ([self._name(name, label.block)], name, amount)
                    for name, amount in events
                    if ends or self._is_near(name, label.block)
                ]
            else:
                events, operators = trace.segments[label]
                renamed = [(self._of_all(name), name, amount) for name, amount in events]
            segments[label] = Segment(tuple((new, amount) for names, _, amount in renamed for new in names), operators)
            streams.update(
                (new, trace.streams[name]) for names, name, _ in renamed for new in names if name in trace.streams
            )
        given, saved, returned = (
            tuple(
                tuple(self._name(name, block) for name in held[old] if name in self._keys)
                for block, old in enumerate(self._places)
            )
            for held in (trace.given, trace.saved, trace.returned)
        )
        return replace(
            trace,
            blocks=tuple(blocks),
            kinds=tuple(trace.kinds[old] for old in self._places),
            segments=segments,
            streams=streams,
            given=given,
            saved=saved,
            returned=returned,
            keeps_input=tuple(trace.keeps_input[old] for old in self._places),
            gradients=tuple(new for name in trace.gradients for new in self._of_all(name)),
        )

    def _ends_row(self, label: Label) -> bool:
        """Whether a segment is the last of those that one segment here stands for."""
        after = label.block + (1 if label.kind == "forward" else -1)
        return not 0 <= after < len(self._places) or self._places[after] != self._places[label.block]

    def _is_near(self, name: int, block: int) -> bool:
        """Whether a storage is of a block or its neighbours; what others made, such as a stage's input, goes once."""
        made = self._keys[name][0].block
        return made >= 0 and abs(made - self._places[block]) <= 1

    def _named(self, label: Label, number: int) -> int:
        return self._names.setdefault((label, number), len(self._names))

    def _of_all(self, name: int) -> list[int]:
        """Return the new names of a storage that is seen from outside of the blocks.

        What a block returns is that of the last of the blocks that it stands for; of the rest, such as autocast's casts
        of weights, each block has its own.
        """
        label, number = self._keys[name]
        if label.block < 0:
            return [self._named(label, number)]
        blocks = self._places_of(label.block)
        if label.kind == "forward" and name in self._trace.returned[label.block]:
            blocks = blocks[-1:]
        return [self._named(label._replace(block=block), number) for block in blocks]

    def _places_of(self, old: int) -> list[int]:
        return [block for block, each in enumerate(self._places) if each == old]

    def _name(self, name: int, block: int) -> int:
        """Return the new name of a storage as seen from a block of the deeper model."""
        label, number = self._keys[name]
        away = label.block - self._places[block]
        if label.block < 0:
            return self._named(label, number)
        if abs(away) > 1:
            nearest = min(self._places_of(label.block), key=lambda each: abs(each - block))
            return self._named(label._replace(block=nearest), number)
        neighbour = label._replace(block=block + away)
        old = label._replace(block=self._places[block + away])
        if old != label:  # another block stands for the neighbour there
            place = self._left[label, self._alike[name]].index(name)
            _, number = self._keys[self._left[old, self._alike[name]][place]]
        return self._named(neighbour, number)


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _done(found: Mapping[str, Any]) -> Done:
    work = dict(found["work"])
    if collective := work.pop("collective", None):
        collective = Collective(**{name: _frozen(value) for name, value in collective.items()})
    turn = Turn(*found["turn"]) if "turn" in found else Turn()
    return Done(found["phase"], OperatorWork(**work, collective=collective), found["on_host"], turn)
