"""Measure what timelines and flame graphs of large steps cost, on steps of random allocations.

Prints the processor time of a timeline and of a page of it, and their sizes::

    .venv/bin/python benchmarks/timelines.py [ALLOCATIONS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from actbench.report.exporting import Exported
from actbench.tools.html.flamegraph import flame_page

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from randomsteps import random_step

Result = TypeVar("Result")
ALLOCATIONS = 100_000
ROUNDS = 3


def timed(made: Callable[[], Result]) -> tuple[Result, float]:
    """Return what a function returns, and the least processor time of a few calls."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        result = made()
        seconds.append(time.process_time() - began)
    return result, min(seconds)


def main() -> None:
    """Print the figures."""
    step = random_step(int(sys.argv[1]) if len(sys.argv) > 1 else ALLOCATIONS)
    timeline, seconds = timed(step.timeline)
    page, drawn = timed(lambda: "".join(flame_page(Exported([], "", [], print), [("exact", timeline)])))
    size = len(timeline.model_dump_json())
    print(f"{timeline.events:,} allocations and frees: a timeline in {seconds:.2f} s, {size:,} bytes")
    print(f"its page in {drawn:.2f} s, {len(page.encode()):,} bytes")


if __name__ == "__main__":
    main()
