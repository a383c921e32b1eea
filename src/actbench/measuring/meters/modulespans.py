"""From when to when each module makes memory: slices of a step that nest as the modules do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile

from actbench.model.timeline import MODULE_SPANS, ModuleSpan


def module_spans(made: Iterable[tuple[int, str]], bounds: Sequence[int], events: int) -> tuple[ModuleSpan, ...]:
    """Return the slices of modules in a step, from the modules that make its storages.

    A module goes on until one outside of it makes a storage, or the part of the step ends. Of too many slices the
    innermost are left out.

    Args:
        made: The number of events before a storage is made, and the path of the module that makes it, in order; what
            no module makes belongs to whatever module goes on.
        bounds: The numbers of events at which parts of the step begin.
        events: The number of events of the step.
    """
    found: list[ModuleSpan] = []
    running: list[tuple[str, int]] = []

    def end(depth: int, at: int) -> None:
        while len(running) > depth:
            path = ".".join(name for name, _ in running)
            found.append(ModuleSpan(module=path, start=running.pop()[1], end=at))

    later = sorted(bounds, reverse=True)
    for at, module in made:
        while later and later[-1] <= at:
            end(0, later.pop())
        if module.startswith("<"):
            continue
        names = module.split(".") if module else []
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1][0], zip(names, running, strict=False)))
        end(shared, at)
        running += [(name, at) for name in names[len(running) :]]
    end(0, min(later[-1:], default=events))
    return _outermost(found)


def _outermost(spans: Sequence[ModuleSpan]) -> tuple[ModuleSpan, ...]:
    """Return the spans of as many levels as a record has room for, each before those within it."""
    levels = Counter(span.module.count(".") for span in spans)
    sums = accumulate(levels[level] for level in range(max(levels, default=-1) + 1))
    shown = max(1, sum(amount <= MODULE_SPANS for amount in sums))
    kept = [span for span in spans if span.module.count(".") < shown]
    return tuple(sorted(kept, key=lambda span: (span.start, -span.end, span.module.count("."))))[:MODULE_SPANS]
