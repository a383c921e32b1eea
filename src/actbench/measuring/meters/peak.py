"""What fills the memory at the peak of a training step, from all allocations and frees until then."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actbench.model.measured import PeakParts, PhasePeaks
from actbench.model.records import Phase
from actbench.model.timeline import Kind
from actbench.simulator.cachingmode import tensors_of

_PASSES = ("forward", "backward")
"""The phases that begin at the two moments of a forward pass."""

_PARTS: Mapping[Kind, str] = {
    "weights": "weights_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_bytes",
    "saved": "activation_bytes",
    "packed": "activation_bytes",
    "cache": "cache_bytes",
    "engine": "engine_bytes",
    "batch": "batch_bytes",
    "kept": "kept_bytes",
    "communication": "communication_bytes",
    "temporary": "temporary_bytes",
}

Event = tuple[int, int]
"""The name of a storage and its bytes from now on, 0 when it is freed; a name is never used again."""


def born(events: Iterable[Event]) -> dict[int, int]:
    """Return the place of the first event of each storage, by its name."""
    places: dict[int, int] = {}
    for place, (name, _) in enumerate(events):
        places.setdefault(name, place)
    return places


def alive(events: Iterable[Event]) -> dict[int, int]:
    """Return the bytes of the storages that are alive after ``events``, by name."""
    return {name: amount for name, amount in dict(events).items() if amount}


@dataclass
class Communicated:
    """Names of storages that collectives read or write.

    Attributes:
        buffers: Buffers of all collectives; a saved tensor may be one of them.
        gathered: Gathered parameters, of which other processes hold shares, and their buffers.
        streams: Streams of a device beside the one that computes, by the names of what is allocated on them.
    """

    buffers: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    streams: dict[int, str] = field(default_factory=dict)

    def note(
        self, names: Callable[[Sequence[Tensor]], set[int]], func: Any, args: Any, kwargs: Any, found: Sequence[Tensor]
    ) -> None:
        """Note what a collective reads and writes; for the operators of FSDP2, what they write and what they gather.

        ``names`` returns the names of the storages of tensors, ``found`` are the tensors that the operator returned.
        """
        if func.namespace != "fsdp":
            given = tensors_of(args)
            self.buffers |= names([*found, *given])
            if func is torch.ops.c10d._reduce_scatter_base_.default:
                self.streams.update(dict.fromkeys(names(given[:1]), "reduce"))
        elif func is torch.ops.fsdp.all_gather_copy_in.default:
            shares, into = names(args[0]), names([args[1]])
            self.gathered |= shares | into
            cast = shares if len(shares) == 1 < len(args[0]) else set()  # those of another type are copied into one
            self.streams.update(dict.fromkeys(into | cast, "gather"))
        else:
            self.gathered |= names([*found, *tensors_of(kwargs)])


@dataclass(frozen=True)
class Moments:
    """The number of events before some moments of a step.

    Attributes:
        begun: Events before the step.
        forwards: Events before the beginning, and before the end, of the forward pass of each micro-batch.
        updating: Events before the optimizer's step.
    """

    begun: int
    forwards: Sequence[tuple[int, int]]
    updating: int

    def phase(self, peak_at: int) -> Phase:
        """Return the part of the step with the last of ``peak_at`` events."""
        if peak_at > self.updating:
            return "optimizer"
        # the end of the last forward pass that began before the peak
        forwarded = next((end for start, end in reversed(self.forwards) if start < peak_at), self.forwards[0][1])
        return "forward" if peak_at <= forwarded else "backward"

    def peaks(self, events: Sequence[Event], repeating: int, made: int) -> PhasePeaks:
        """Return the peak of each part of the step.

        Args:
            events: Events of the whole step and before it.
            repeating: Number of events before the optimizer's second step, the one that counts.
            made: Bytes of optimizer state that did not exist during the forward and backward pass.
        """
        live, held, found = 0, dict[int, int](), {"forward": 0, "backward": 0, "optimizer": 0}
        passes = sorted(
            (moment, phase) for pass_ in self.forwards for moment, phase in zip(pass_, _PASSES, strict=True)
        )
        turns = deque([*passes, (self.updating, "nothing"), (repeating, "optimizer")])
        phase = "nothing"
        for place, (name, amount) in enumerate(events):
            while turns and turns[0][0] <= place:
                phase = turns.popleft()[1]
                if phase in found:
                    found[phase] = max(found[phase], live)
            live += amount - held.get(name, 0)
            held[name] = amount
            if phase in found and live > found[phase]:
                found[phase] = live
        return PhasePeaks(
            forward_bytes=found["forward"] + made,
            backward_bytes=found["backward"] + made,
            optimizer_bytes=found["optimizer"] if repeating < len(events) else live,
        )

    def kinds(
        self,
        events: Sequence[Event],
        *,
        weights: Set[int],
        state: Set[int],
        gradients: Set[int],
        packed: Set[int] = frozenset(),
        cached: Set[int] = frozenset(),
        communicated: Communicated | None = None,
    ) -> dict[int, Kind]:
        """Return the kind of each storage; storages that are not named are temporaries.

        ``weights``, ``state``, ``gradients``, ``packed``, which a scheme packed, and ``cached``, those of a cache of
        keys and values, are names of storages.
        """
        held = set(alive(events[: self.begun]))
        live, saved, played = dict(events[: self.begun]), set[int](), self.begun
        for _, end in self.forwards:
            live.update(events[played:end])
            played = end
            saved.update(name for name, amount in live.items() if amount)
        communicated = communicated or Communicated()
        groups: tuple[tuple[Kind, Set[int]], ...] = (
            ("communication", communicated.buffers),
            ("saved", saved),
            ("packed", saved & packed),
            ("cache", cached),
            ("batch", held),
            ("communication", communicated.gathered),
            ("gradients", gradients),
            ("optimizer", state),
            ("weights", weights),
        )
        return {name: kind for kind, names in groups for name in names}

    @staticmethod
    def parts(
        events: Sequence[Event], peak_at: int, kinds: Mapping[int, Kind], untracked: PeakParts | None = None
    ) -> PeakParts:
        """Return the parts of what is alive after ``peak_at`` events, with ``untracked`` bytes added."""
        found = Counter({} if untracked is None else untracked.model_dump())
        for name, amount in alive(events[:peak_at]).items():
            found[_PARTS[kinds.get(name, "temporary")]] += amount
        return PeakParts(**found)
