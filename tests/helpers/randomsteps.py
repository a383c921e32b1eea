"""Steps of random allocations, for what draws the memory over a step."""

from __future__ import annotations

import random

from actbench.measuring.meters.stepevents import HostEvent, Origin, StepEvents
from actbench.model.timeline import KINDS


def random_step(allocations: int) -> StepEvents:
    """Return a step of random allocations of many modules, most of which are freed again."""
    chosen = random.Random(0)
    events: list[tuple[int, int]] = []
    total = peak = peak_at = 0
    for name in range(allocations):
        events.append((name, amount := chosen.randrange(1, 1 << 20)))
        total += amount
        if total > peak:
            peak, peak_at = total, len(events)
        if name > 50 and name % 3:
            freed = events[-2]
            if freed[1]:
                events.append((freed[0], 0))
                total -= freed[1]
    return StepEvents(
        events=events,
        before=10,
        peak_at=peak_at,
        spans=[("forward", 10), ("backward", allocations // 2), ("optimizer", allocations)],
        kinds={name: KINDS[name % 8] for name in range(allocations) if name % 5},
        origins={
            name: Origin(f"blocks.{name % 12}.part{name % 17}", "aten::mm", f"train.py:{name % 7} x = model(x)")
            for name in range(allocations)
            if name % 11
        },
        host=[HostEvent(20, -1, 1 << 30)],
    )
