"""Joins segments of traces: the step of a plan that does one thing with some blocks and another thing with others.

One trace has each action on all blocks. A plan takes the two segments of each block from the trace of its action, and
all that is outside of the blocks from the trace without an action. Storages that one segment allocates and another one
frees are freed where the last of those lets go that hold them in this plan:

- What a block's backward pass still frees is held by the block itself: its own action says when.
- A result of a block, and what is allocated before the blocks, is held by the caller of the blocks, and by those blocks
  whose action keeps it. The backward pass of the first of these is the last to run.
- A gradient is freed by the block before, as its action says.
- What only an action allocates, such as a copy on its way to host memory, is freed by the next block of this action;
  at the top if its own trace frees it there, as autocast does with its casts of weights.

Storages of two traces stand for each other if the same segment allocates as many bytes, and as many such storages
before them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from actbench.measuring.meters.peak import Event, alive
from actbench.model.measured import PhasePeaks
from actbench.simulator.cost.recorder import Done
from actbench.simulator.trace import BEFORE, HOST, OPTIMIZER, STATE, TOP, Label, Trace, labels_of

_FIRST, _LAST = -1, 1 << 40
"""Places in a segment before and after all of its events."""

_Moment = tuple[Label, int]
"""A segment, and a place in it: after the event of this number."""


@dataclass(frozen=True)
class Joined:
    """A step that was joined from segments.

    Attributes:
        run: The events of two steps in a row, from which an allocator's reserved bytes follow.
        phases: The peak of each part of the step.
        host_bytes: Most bytes in host memory.
        done: The operators of the step; ``more_seconds`` is its time beyond theirs.
        streams: Of storages that are not allocated on the stream that computes.
        activation_bytes: Bytes that are alive after the forward pass and were not before it.
        expandable: Whether the allocator's segments grow.
    """

    run: Sequence[Sequence[Event]]
    phases: PhasePeaks
    host_bytes: int
    done: Sequence[Done]
    more_seconds: float
    streams: Mapping[int, str]
    activation_bytes: int
    expandable: bool

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the step."""
        return max(self.phases.forward_bytes, self.phases.backward_bytes, self.phases.optimizer_bytes)


class _Cut:
    """What a join looks up in a trace.

    Attributes:
        trace: The trace.
        made: Segment that allocates each storage.
        freed: Where the passes free each storage; what they leave is not listed.
        size: The most bytes of each storage.
        foreign: Storages that each segment frees and another block, or none, allocates.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.made: dict[int, Label] = {}
        self.freed: dict[int, _Moment] = {}
        self.size: dict[int, int] = {}
        for label, segment in trace.segments.items():
            for place, (name, amount) in enumerate(segment.events):
                self.made.setdefault(name, label)
                self.size[name] = max(self.size.get(name, 0), amount)
                if amount:
                    self.freed.pop(name, None)
                elif label not in (STATE, OPTIMIZER):
                    self.freed[name] = label, place
        self.foreign: dict[Label, list[int]] = defaultdict(list)
        self.given = [frozenset(names) for names in trace.given]
        self._saved = [frozenset(names) for names in trace.saved]
        self._returned = [frozenset(names) for names in trace.returned]
        self._alike: dict[Hashable, list[int]] = defaultdict(list)
        self._role: dict[int, tuple[Hashable, int]] = {}
        for name, label in self.made.items():
            if name in self.freed and self.leaves(name):
                self.foreign[self.freed[name][0]].append(name)
            if self.is_returned(name) or self.leaves(name):
                role = self.is_returned(name) or (self.size[name], name in self.freed, trace.streams.get(name))
                self._role[name] = (label, role), len(self._alike[label, role])
                self._alike[label, role].append(name)

    def leaves(self, name: int) -> bool:
        """Whether a storage outlives the segment, or the passes of the block, that allocates it."""
        label = self.made[name]
        freed = self.freed[name][0] if name in self.freed else OPTIMIZER
        return freed != label and not (label.kind == "forward" and freed == Label("backward", label.block))

    def is_returned(self, name: int) -> bool:
        """Whether a block returns a storage."""
        label = self.made[name]
        return label.kind == "forward" and name in self._returned[label.block]

    def keeps(self, block: int, name: int) -> bool:
        """Whether a block is known to keep a storage that was made before it."""
        label = self.made[name]
        is_input = label.block == block - 1 and self.is_returned(name) and self.trace.keeps_input[block]
        return is_input or name in self._saved[block]

    def counterpart(self, other: _Cut, name: int) -> int | None:
        """Return the storage that stands here for one of another trace."""
        role, number = other._role[name]
        equal = self._alike.get(role, ())
        return equal[number] if number < len(equal) else None


class Joiner:
    """Joins plans from the traces of one model.

    Args:
        base: The trace without an action on any block, which also gives all that is outside of the blocks.
        traces: The trace of each further action; more may be added later.
    """

    def __init__(self, base: Trace, traces: Mapping[Hashable, Trace]) -> None:
        self._base = _Cut(base)
        self._traces = traces
        self._cuts: dict[Hashable, _Cut] = {}

    @cached_property
    def unchanged(self) -> Joined:
        """The step without an action on any block."""
        return _Join(self._base, [self._base] * len(self._base.trace.blocks)).run()

    def join(self, plan: Sequence[Hashable]) -> Joined:
        """Return the step in which each block has its action; one without a trace is left as it is."""
        new = (self._traces.keys() & set(plan)) - self._cuts.keys()
        self._cuts.update((action, _Cut(self._traces[action])) for action in new)
        return _Join(self._base, [self._cuts.get(action, self._base) for action in plan]).run()


class _Join:
    """One plan's join.

    ``held`` has the storages that are alive, each with the segment that allocated it; ``frees`` what each segment frees
    of others, by the place; ``taken`` what a segment frees that no other segment of its trace needs to allocate;
    ``forwarded`` is how many events of the top belong to the forward pass.
    """

    def __init__(self, base: _Cut, plan: Sequence[_Cut]) -> None:
        self._base, self._plan = base, plan
        self._labels = labels_of(len(plan))
        self._rank = {label: rank for rank, label in enumerate(self._labels)}
        self._names: dict[tuple[int, int], int] = {}
        self._streams: dict[int, str] = {}
        self._held: dict[int, Label] = {}
        self._frees: dict[Label, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._taken: set[tuple[Label, int]] = set()
        self._forwarded = -1
        self._is_cleared = False
        self._before = _by_size(base, (name for name in base.freed if base.made[name] == BEFORE))

    def run(self) -> Joined:
        """Play all segments in order."""
        played: dict[Label, list[Event]] = {}
        for label in self._labels:
            played[label] = []
            for each in self._played(label, played[label]):
                self._held.pop(each[0], None) if not each[1] else self._held.setdefault(each[0], label)
                played[label].append(each)
        top, forwarded = self._rank[TOP], self._forwarded
        begun, passes = played[BEFORE], [played[label] for label in self._labels[1:-2]]
        usage = _Usage(self._streams)
        usage.play(begun)
        before = usage.live
        forward = usage.play(itertools.chain(*passes[: top - 1], played[TOP][:forwarded]))
        activations = usage.live - before
        backward = usage.play(itertools.chain(played[TOP][forwarded:], *passes[top:]))
        usage.play(played[STATE])
        update = usage.play(played[OPTIMIZER])
        state, cyclic = self._base.trace.state_bytes, self._base.trace.cyclic_bytes
        parts = [begun, [*itertools.chain(*passes)], played[STATE], played[OPTIMIZER]]
        parts = [[each for each in part if self._streams.get(each[0]) != HOST] for part in parts]
        return Joined(
            run=self._run(*parts),
            phases=PhasePeaks(
                forward_bytes=forward + state, backward_bytes=backward + state, optimizer_bytes=update + cyclic
            ),
            host_bytes=usage.most_on_host,
            done=[*self._done()],
            more_seconds=self._base.trace.more_seconds,
            streams=self._streams,
            activation_bytes=activations,
            expandable=self._base.trace.expandable,
        )

    def _run(
        self, begun: list[Event], passes: list[Event], state: list[Event], update: list[Event]
    ) -> list[Sequence[Event]]:
        """Return the events of two steps in a row.

        If a step follows others, the first one finds no gradients, as none does before it, and the second one what the
        first left. Gradients that add up are there from the first update on.
        """
        if not self._base.trace.follows:
            return [begun, passes, state, update, passes, update]
        found, left = alive([*begun, *state]), alive([*begun, *passes, *state, *update])
        waiting = defaultdict[int, list[int]](list)
        for name, amount in left.items():
            if name not in found:
                waiting[amount].append(name)
        names: dict[int, int] = {}
        for name, amount in found.items():
            if name not in left and waiting[amount]:
                names[name] = waiting[amount].pop(0)
        for name in [*names.values()]:
            names[name] = self._names[id(self), name] = len(self._names)  # it is made anew while the first one is held
            if name in self._streams:
                self._streams[names[name]] = self._streams[name]
        gradients = {self._name(self._base, name) for name in self._base.trace.gradients}
        added = [(name, amount) for name, amount in begun if name in gradients & left.keys()]
        again = [[(names.get(name, name), amount) for name, amount in part] for part in (passes, update)]
        return [[each for each in begun if each[0] not in gradients], passes, [*added, *state], update, *again]

    def _done(self) -> Iterator[Done]:
        """Yield the operators of the step, those of each micro-batch like those of the last."""
        passes = [
            self._of(label).trace.operators[place]
            for label in self._labels[1:-2]
            for place in self._of(label).trace.segments[label].operators
        ]
        for _ in range(self._base.trace.micro_batches):
            yield from passes
        for place in self._base.trace.segments[OPTIMIZER].operators:
            yield self._base.trace.operators[place]

    def _of(self, label: Label) -> _Cut:
        return self._plan[label.block] if label.block >= 0 else self._base

    def _name(self, cut: _Cut, name: int) -> int:
        """Return the name in this step of a storage of a trace."""
        key = id(cut), name
        if key not in self._names:
            self._names[key] = len(self._names)
            if (stream := cut.trace.streams.get(name)) is not None:
                self._streams[self._names[key]] = stream
        return self._names[key]

    def _played(self, label: Label, played: Sequence[Event]) -> Iterator[Event]:
        """Yield the events of a segment; ``played`` has those that were yielded."""
        cut, frees = self._of(label), self._frees[label]
        yield from self._taken_over(label, cut)
        yield from self._freed(frees, _FIRST)
        for place, (name, amount) in enumerate(cut.trace.segments[label].events):
            if label == TOP and place == self._base.trace.forwarded:
                self._forwarded = len(played)
            made = cut.made[name]
            joined = self._name(cut, name)
            if made == label:
                if joined in self._held or self._is_kept(label, cut, name, joined):
                    yield joined, amount
            elif made == BEFORE and label.block >= 0:
                yield from self._freed_from_before(cut, name, amount)
            elif label in (STATE, OPTIMIZER) and made not in (BEFORE, STATE):
                yield from self._freed_after_passes(name)
            elif joined in self._held and not (cut.leaves(name) and made not in (BEFORE, STATE)):
                yield joined, amount
            yield from self._freed(frees, place)
        if label == TOP and self._forwarded < 0:
            self._forwarded = len(played)
        for place in sorted(frees):
            yield from self._freed(frees, place)

    def _freed(self, frees: Mapping[int, Sequence[int]], place: int) -> Iterator[Event]:
        for joined in frees.get(place, ()):
            if joined in self._held:
                yield joined, 0

    def _freed_from_before(self, cut: _Cut, name: int, amount: int) -> Iterator[Event]:
        """Free what was alive before the step, such as what a loop holds of the step before."""
        equal = self._before.get(cut.size[name], [])
        if not amount and equal:
            yield self._name(self._base, equal.pop(0)), 0

    def _freed_after_passes(self, name: int) -> Iterator[Event]:
        """Free what the passes left: gradients, unless the step leaves them to the next one."""
        maker = self._of(self._base.made[name])
        same = name if maker is self._base else maker.counterpart(self._base, name)
        equal = [] if same is None else [self._name(maker, same)]
        if not self._base.trace.follows:
            equal, self._is_cleared = [] if self._is_cleared else [*self._held], True
        for joined in equal:
            if self._held.get(joined, BEFORE) not in (BEFORE, STATE, OPTIMIZER):
                yield joined, 0

    def _is_kept(self, label: Label, cut: _Cut, name: int, joined: int) -> bool:
        """Decide where a new storage is freed; return whether this step allocates it at all."""
        if label in (BEFORE, STATE, OPTIMIZER) or not cut.leaves(name) or name not in cut.freed:
            return True
        if label.block >= 0 and cut is not self._base and self._base.counterpart(cut, name) is None:
            moment = self._of_action(label, cut, name)
        elif self._rank[label] < self._rank[TOP]:
            moment = self._last_let_go(label, cut, name)
        else:
            moment = self._read(label, cut, name)
        if moment is not None:
            self._frees[moment[0]][moment[1]].append(joined)
        return moment is not None

    def _of_action(self, label: Label, cut: _Cut, name: int) -> _Moment | None:
        """Return where the action frees what it alone allocates: in its next segment; None if that never comes."""
        freed = cut.freed[name]
        if freed[0].block >= 0 and self._of(freed[0]) is cut:
            return freed
        later = self._labels[self._rank[label] + 1 : -2]
        after = next((each for each in later if each.block >= 0 and self._of(each) is cut), None)
        if freed[0] == TOP:  # the caller of the blocks holds it, as autocast its casts of weights until the pass ends
            return TOP, self._place(cut, name, TOP)
        if label.kind == "forward":
            return (TOP, _FIRST) if after is None else (after, _FIRST)
        if after is None:
            return None
        for other in cut.foreign[after]:
            is_alike = cut.made[other].kind == "backward" and cut.size[other] == cut.size[name]
            if is_alike and (after, other) not in self._taken:
                self._taken.add((after, other))
                return after, cut.freed[other][1]
        return after, _FIRST

    def _taken_over(self, label: Label, cut: _Cut) -> Iterator[Event]:
        """Allocate what a segment frees and the segment before did not allocate, being of another action."""
        if label.kind != "backward" or cut is self._base:
            return
        for name in cut.foreign[label]:
            made = cut.made[name]
            if made.kind != "backward" or self._of(made) is cut or (label, name) in self._taken:
                continue
            if self._base.counterpart(cut, name) is None:
                joined = self._name(cut, name)
                self._frees[label][cut.freed[name][1]].append(joined)
                yield joined, cut.size[name]

    def _last_let_go(self, label: Label, cut: _Cut, name: int) -> _Moment:
        """Return where the last lets go of what was made before the top."""
        found = list[_Moment]()
        for other in dict.fromkeys((self._base, *self._plan)):
            same = name if other is cut else other.counterpart(cut, name)
            if same is None or same not in other.freed:
                continue
            freed = other.freed[same][0]
            later = enumerate(self._plan[label.block + 1 :], label.block + 1)
            blocks = [block for block, action in later if action is other and same in other.given[block]]
            if freed.kind != "backward" or self._of(freed) is other:
                found.append((freed, self._place(other, same, freed)))
                continue
            # its own block holds it where it is freed there; of others it is only known what their graph saves
            own = freed.block == label.block
            holders = (block for block in blocks if (other.keeps(block, same) if own else block >= freed.block))
            if (holder := next(holders, None)) is not None:
                last = Label("backward", holder)
                found.append((last, _LAST if own else self._place(other, same, last)))
        if not found:
            found.append((self._labels[self._rank[label] + 1], _LAST))
        return max(found, key=lambda moment: (self._rank[moment[0]], moment[1]))

    def _place(self, cut: _Cut, name: int, label: Label) -> int:
        """Return the place in a segment of this step where a storage is freed that a trace frees in one like it.

        It is where the segment's own trace frees what stands for the storage. Else it is the place after as many
        allocations; in a block that has another action or is of another kind, its end.
        """
        freed, place = cut.freed[name]
        mine = self._of(label)
        same = name if mine is cut else mine.counterpart(cut, name)
        if same is not None and same in mine.freed and mine.freed[same][0] == label:
            return mine.freed[same][1]
        kinds = cut.trace.kinds
        if label.block >= 0 and (mine is not cut or kinds[label.block] != kinds[freed.block]):
            return _LAST
        count = sum(
            1 for each, amount in cut.trace.segments[freed].events[:place] if amount and cut.made[each] == freed
        )
        for at, (each, amount) in enumerate(mine.trace.segments[label].events):
            count -= bool(amount and mine.made[each] == label)
            if count < 0:
                return at - 1
        return _LAST

    def _read(self, label: Label, cut: _Cut, name: int) -> _Moment:
        """Return where the next segment frees a gradient, by its own trace."""
        reader = self._of(self._labels[self._rank[label] + 1])
        same = reader.counterpart(cut, name)
        if same is None or same not in reader.freed:
            reader, same = cut, name
        freed = reader.freed[same][0]
        return freed, self._place(reader, same, freed)


class _Usage:
    """Bytes that are alive while events are played."""

    def __init__(self, streams: Mapping[int, str]) -> None:
        self._streams, self._amounts = streams, dict[int, int]()
        self.live = self._on_host = self.most_on_host = 0

    def play(self, events: Iterable[Event]) -> int:
        """Return the most bytes on the device from now until after these events."""
        most = self.live
        for name, amount in events:
            more = amount - self._amounts.get(name, 0)
            self._amounts[name] = amount
            if self._streams.get(name) == HOST:
                self._on_host += more
                self.most_on_host = max(self.most_on_host, self._on_host)
            else:
                self.live += more
                most = max(most, self.live)
        return most


def _by_size(cut: _Cut, names: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for name in names:
        found[cut.size[name]].append(name)
    return found
