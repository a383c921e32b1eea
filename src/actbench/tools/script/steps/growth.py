"""What each step of a script leaves on the card, for good or until Python's collector runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from actbench.measuring.meters.peak import Event, alive, born
from actbench.measuring.meters.stepevents import Origin
from actbench.model.measured import Growth, GrowthKind, Measurement
from actbench.report.advice import needed_bytes
from actbench.tools.script.steps.counting import Step

_FEWEST = 2
"""Steps that must have left something: one alone may have filled a cache."""

_MUCH = 0.01
"""Share of the peak that cycles of references have to hold for a user to be told."""

_NEVER = 1_000_000
"""Steps after which no training goes on: what fills the card later is no growth."""


class Keeper(NamedTuple):
    """What keeps the tensors that steps leave: a line, or a variable where no line fills one, and what it is."""

    line: str
    kind: GrowthKind


def with_growth(
    found: Measurement,
    steps: Sequence[Step],
    events: Sequence[Event],
    origins: Mapping[int, Origin],
    kept: Set[int],
    keeper: Keeper | None,
) -> Measurement:
    """Return a measurement with what each of ``steps`` but the last left alive at the end, if each did.

    Else with what each left in cycles of references, if that is much.

    Args:
        found: The measurement of the largest step.
        steps: The last steps, with optimizer state from their beginning.
        events: All events; those after the last of these steps do not count.
        origins: Who made each storage.
        kept: Names of weights, gradients and optimizer state, which a step may make anew.
        keeper: What keeps what is left, if it is known.
    """
    found = _with_cycles(found, steps, events, origins)
    if len(steps) <= _FEWEST or (steps[-1].is_like(steps[-2]) and not steps[-1].has_grown_from(steps[-2])):
        return found
    left = list(left_alive(events[: steps[-1].ended], kept))
    amounts = [sum(amount for _, place, amount in left if step.begun <= place < step.ended) for step in steps[:-1]]
    rate, limit = min(amounts), found.memory_limit_bytes  # some steps may have filled a cache, too
    if not rate:
        return found
    more = None if limit is None else max(0, limit - needed_bytes(found)) // rate
    if more is not None and more > _NEVER:
        return found
    line = _line(((name, amount) for name, place, amount in left if steps[0].begun <= place < steps[-1].begun), origins)
    grown = Growth(step_bytes=rate, more_steps=more, line=line)
    if keeper is not None:
        grown = grown.model_copy(update={"keeper": keeper.line, "kind": keeper.kind})
    return found.model_copy(update={"growth": grown})


def _with_cycles(
    found: Measurement, steps: Sequence[Step], events: Sequence[Event], origins: Mapping[int, Origin]
) -> Measurement:
    if len(steps) < _FEWEST:
        return found
    sizes = {name: amount for name, amount in events if amount}
    dropped = [
        [
            (name, sizes[name])
            for begun, ended in step.collected
            for name, amount in events[begun:ended]
            if begun >= step.begun and not amount  # not what ran before the step, such as an evaluation
        ]
        for step in steps
    ]
    rate = min((sum(amount for _, amount in each) for each in dropped), default=0)
    if not rate or rate < _MUCH * found.peak_bytes:
        return found
    grown = Growth(kind="cycle", step_bytes=rate, line=_line(dropped[-1], origins))
    return found.model_copy(update={"growth": grown})


def _line(held: Iterable[tuple[int, int]], origins: Mapping[int, Origin]) -> str | None:
    """Return the line that made most of the bytes of storages, if it is known."""
    lines: Counter[str] = Counter()
    for name, amount in held:
        lines[origins[name].line if name in origins else ""] += amount
    lines.pop("", None)
    return max(lines, key=lines.__getitem__) if lines else None


def left_alive(events: Sequence[Event], kept: Set[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the name, the place of its first event and the bytes of each storage that is alive and not ``kept``."""
    places = born(events)
    return ((name, places[name], amount) for name, amount in alive(events).items() if name not in kept)
