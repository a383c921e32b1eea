"""A simulated step as a value: what it allocates, frees and runs, cut where the blocks of a model begin and end.

A step of n blocks has the segments ``before``, ``start``, ``forward`` 0 to n - 1, ``top``, ``backward`` n - 1 to 0,
``end``, ``state`` and ``optimizer``. What is alive when the forward pass begins is allocated in ``before``. ``start``
is the forward pass until the first block, ``top`` all from the end of the last block until its backward pass, ``end``
what follows the backward pass of the first. The optimizer steps twice: ``state`` is the step that makes its state, and
``optimizer`` the one that every later step of training repeats.
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
        operators: All different operators, with the phase in which each runs.
        forwarded: How many events of the top belong to the forward pass.
        state_bytes: Optimizer state that exists while the passes run, though they were simulated without it.
        cyclic_bytes: Bytes that the optimizer's step needs beyond its events.
        micro_batches: How many micro-batches the step has.
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
    state_bytes: int = 0
    cyclic_bytes: int = 0
    micro_batches: int = 1
    expandable: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the trace as lines of JSON: what holds for the whole step, then operators, segments and streams."""
        of_blocks = ("blocks", "kinds", "given", "saved", "returned", "keeps_input")
        numbers = ("forwarded", "state_bytes", "cyclic_bytes", "micro_batches", "expandable")
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

    def repeated(self, blocks: Sequence[str]) -> Trace:
        """Return the trace of a deeper model, whose blocks in the middle do what those in the middle of this one do.

        It takes four blocks. The forward pass of the third is repeated, and the backward pass of the second: what these
        two take over from the block before is what a block in the middle leaves.
        """
        last, more = len(blocks) - 1, len(blocks) - 4
        forward = [number if number < 2 else 3 if number == last else 2 for number in range(len(blocks))]
        backward = [max(number - more, min(number, 1)) for number in range(len(blocks))]
        keys, names = self.keys(), dict[tuple[Label, int], int]()

        def renamed(name: int, shift: int | None) -> int:
            """Return the new name of a storage, as seen from a block that has moved by ``shift``, or from none."""
            label, number = keys[name]
            if label.block >= 0:
                moved = more * (label.block > 1) if shift is None else shift
                label = label._replace(block=label.block + moved)
            return names.setdefault((label, number), len(names))

        segments, streams = dict[Label, Segment](), dict[int, str]()
        for label in labels_of(len(blocks)):
            old, shift = label, None
            if label.block >= 0:
                old = label._replace(block=(forward if label.kind == "forward" else backward)[label.block])
                shift = label.block - old.block
            events, operators = self.segments[old]
            segments[label] = Segment(tuple((renamed(name, shift), amount) for name, amount in events), operators)
            streams.update((renamed(name, shift), self.streams[name]) for name, _ in events if name in self.streams)
        given, saved, returned = (
            tuple(
                tuple(renamed(name, number - old) for name in held[old] if name in keys)
                for number, old in enumerate(forward)
            )
            for held in (self.given, self.saved, self.returned)
        )
        return replace(
            self,
            blocks=tuple(blocks),
            kinds=tuple(self.kinds[old] for old in forward),
            segments=segments,
            streams=streams,
            given=given,
            saved=saved,
            returned=returned,
            keeps_input=tuple(self.keeps_input[old] for old in forward),
        )

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
