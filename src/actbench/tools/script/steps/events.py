"""What each part of a script's whole run needs, from all events: steps, evaluations, generation, saves and loads."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from actbench.measuring.meters.peak import Event
from actbench.model.measured import Growth, RunEvent, RunPart
from actbench.tools.script.steps.counting import LOADS, Span, Step

_STEEPEST = 3
"""Times what a batch leaves, by which the next peak can grow: a tensor that is joined anew is there twice."""


class Bytes:
    """The bytes that are alive, and that the allocator has of the card, at each event.

    Args:
        events: All events.
        reserved: From how many events on how many bytes were reserved; empty for other devices.
        limit_bytes: The memory of the device.
    """

    def __init__(self, events: Sequence[Event], reserved: Sequence[tuple[int, int]], limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self._reserved, self._since = [amount for _, amount in reserved], [at for at, _ in reserved]
        self._live = [0]
        held: dict[int, int] = {}
        for name, amount in events:
            self._live.append(self._live[-1] + amount - held.get(name, 0))
            held[name] = amount

    def at(self, moment: int) -> int:
        """Return the bytes alive at a moment."""
        return self._live[moment]

    def most(self, begun: int, ended: int) -> int:
        """Return the most bytes alive between two moments."""
        return max(self._live[begun : ended + 1])

    def lowest(self, begun: int, ended: int) -> int:
        """Return the last moment between two at which the fewest bytes are alive."""
        return min(range(ended, begun - 1, -1), key=self._live.__getitem__)

    def event(self, part: RunPart, begun: int, ended: int, peak_bytes: int | None = None, **more: Any) -> RunEvent:
        """Return what a part of the run needs; ``peak_bytes`` if more than what was seen."""
        seen = self.most(begun, ended)
        peak = max(seen, peak_bytes or 0)
        reserved = self._most_reserved(begun, ended, seen)
        over = 0 if self.limit_bytes is None else max(peak, reserved or 0) - self.limit_bytes
        return RunEvent(
            part=part,
            peak_bytes=peak,
            reserved_bytes=None if reserved is None else max(reserved, peak),
            over_limit_bytes=over if over > 0 else None,
            **more,
        )

    def _most_reserved(self, begun: int, ended: int, peak_bytes: int) -> int | None:
        """Return the most bytes reserved; where an earlier part took more than the card has, what this one adds."""
        if not self._since:
            return None
        first, last = bisect.bisect_right(self._since, begun), bisect.bisect_right(self._since, ended)
        if found := self._reserved[first:last]:
            return max(found)
        before = self._reserved[first - 1] if first else 0
        return before if self.limit_bytes is None or before <= self.limit_bytes else peak_bytes


def run_events(
    steps: Sequence[Step],
    rest: Step | None,
    found: Bytes,
    growth: Growth | None = None,
    first_epoch: int | None = None,
    epoch_steps: int | None = None,
    began: int = 1,
) -> tuple[RunEvent, ...]:
    """Return the parts of a run, each kind and line of them once, in the order in which they were first seen.

    Args:
        steps: All steps.
        rest: What ran after them.
        found: The bytes at each event.
        growth: What each step leaves.
        first_epoch: How many steps the first epoch had here.
        epoch_steps: How many it has in the real run.
        began: The number of the step that makes optimizer state. What ran before it was without a scheme, and is no
            part of the run.
    """
    each: list[RunEvent] = []
    for number, step in enumerate((*steps, *([rest] if rest is not None else [])), start=1):
        each += (_of_span(span, found) for span in step.spans)
        if began <= number <= len(steps):
            each.append(found.event(_part(step, is_first=number == began), step.begun, step.ended))
    more = 0 if first_epoch is None else (epoch_steps or 0) - first_epoch
    if growth is not None and growth.is_lasting and first_epoch is not None and more > 0:
        last = steps[first_epoch - 1]
        most = last.peak_bytes + more * growth.step_bytes
        each.append(found.event("last step", last.begun, last.ended, most, batches=epoch_steps))
    merged: dict[tuple[RunPart, str | None], RunEvent] = {}
    for one in each:
        key = one.part, one.line
        other = merged.get(key)
        larger = one if other is None or one.peak_bytes > other.peak_bytes else other
        merged[key] = larger.model_copy(update={"count": 1 + (other.count if other else 0)})
    return tuple(merged.values())


def _part(step: Step, *, is_first: bool) -> RunPart:
    before = {span.part for span in step.spans}
    if is_first:
        return "first step"
    return "resumed step" if "resume" in before else "next step" if "evaluation" in before else "step"


def _of_span(span: Span, found: Bytes) -> RunEvent:
    """Return what a part needs; of an evaluation that was cut short, what it needs with all of its batches."""
    of = span.follows or span
    if span.ends_lowest:
        span.ended = found.lowest(span.begun, span.ended)
    elif span.part in ("save", *LOADS):  # with the copies that are made for it
        span.begun = found.lowest(span.begun, span.ended)
    about: dict[str, Any] = {"line": span.line or None, "has_graph": of.has_graph}
    if of.part == "evaluation":
        about["batch_bytes"] = _left(of, found)
    if of.of is None or len(of.batches) >= of.of or len(of.batches) < 2:
        return found.event(span.part, span.begun, span.ended, **about)
    left, more = _left(of, found), of.of - len(of.batches)
    kept = found.at(of.ended) - found.at(of.begun)
    if not left or kept <= 0:
        most = None
    elif span is of:
        most = max(_peaks(span, found)) + more * _rise(span, found, left)
    else:
        most = _with_all(span, of, found, left, more)
    return found.event(span.part, span.begun, span.ended, most, **{**about, "batches": of.of})


def _with_all(span: Span, of: Span, found: Bytes, left: int, more: int) -> int:
    """Return the peak of what is made of the outputs of all batches, such as one tensor of them.

    A batch that was loaded ahead runs when its loader has no more, and its outputs may be joined with those before it.
    """
    late, count = bool(span.batches), len(of.batches)
    ran = span.batches[-1] if late else span.begun
    made = found.most(ran, span.ended) - found.at(ran)
    shares = [made / (left * outputs) for outputs in ((count, count - 1) if late else (count,))]
    share = min(shares, key=lambda each: abs(each - round(each)))
    before = found.most(span.begun, ran) + more * left
    return max(before, found.at(ran) + more * left + made + int(share * more * left))


def _peaks(span: Span, found: Bytes) -> list[int]:
    return [found.most(*pair) for pair in itertools.pairwise([*span.batches, span.ended])]


def _left(span: Span, found: Bytes) -> int:
    """Return what each batch of an evaluation leaves until its end."""
    grown = [found.at(later) - found.at(at) for at, later in itertools.pairwise(span.batches)]
    return max(0, int(statistics.median(grown[1:] or grown))) if grown else 0


def _rise(span: Span, found: Bytes, left: int) -> int:
    """Return by how much the peak of a batch is above that of the one before; the second is the largest."""
    peaks = _peaks(span, found)[2:]
    steps = [later - one for one, later in itertools.pairwise(peaks)] or [left]
    return min(max(int(statistics.median(steps)), left), _STEEPEST * left)
