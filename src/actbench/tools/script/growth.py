"""What each step of a script leaves on the card for good, by which its memory grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from actbench.measuring.meters.peak import Event, alive, born
from actbench.measuring.meters.stepevents import Origin
from actbench.model.measured import Growth, Measurement
from actbench.report.advice import needed_bytes
from actbench.tools.script.counting import Step

_FEWEST = 2
"""Steps that must have left something: one alone may have filled a cache."""

_NEVER = 1_000_000
"""Steps after which no training goes on: what fills the card later is no growth."""


def with_growth(
    found: Measurement,
    steps: Sequence[Step],
    events: Sequence[Event],
    origins: Mapping[int, Origin],
    kept: Set[int],
    keeper: str | None,
) -> Measurement:
    """Return a measurement with what each of ``steps`` but the last left alive at the end, if each did.

    Args:
        found: The measurement of the largest step.
        steps: The last steps, with optimizer state from their beginning.
        events: All events; those after the last of these steps do not count.
        origins: Who made each storage.
        kept: Names of weights, gradients and optimizer state, which a step may make anew.
        keeper: The line that keeps what is left, if it is known.
    """
    if len(steps) <= _FEWEST or (steps[-1].is_like(steps[-2]) and not steps[-1].has_grown_from(steps[-2])):
        return found
    left = list(left_alive(events[: steps[-1].ended], kept))
    amounts = [sum(amount for _, place, amount in left if step.begun <= place < step.ended) for step in steps[:-1]]
    rate, limit = min(amounts), found.memory_limit_bytes  # some steps may have filled a cache, too
    if not rate:
        return found
    lines: Counter[str] = Counter()
    for name, place, amount in left:
        if name in origins and steps[0].begun <= place < steps[-1].begun:
            lines[origins[name].line] += amount
    lines.pop("", None)
    more = None if limit is None else max(0, limit - needed_bytes(found)) // rate
    if more is not None and more > _NEVER:
        return found
    line = max(lines, key=lines.__getitem__) if lines else None
    return found.model_copy(update={"growth": Growth(step_bytes=rate, more_steps=more, line=line, keeper=keeper)})


def left_alive(events: Sequence[Event], kept: Set[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the name, the place of its first event and the bytes of each storage that is alive and not ``kept``."""
    places = born(events)
    return ((name, places[name], amount) for name, amount in alive(events).items() if name not in kept)
