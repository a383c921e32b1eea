"""Timelines for other people's viewers: who holds the peak as stacks, and the memory over a step as counters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from actbench.model.timeline import OTHER, TITLES, Holds, Kind, Timeline
from actbench.report.tables.step import display_holder

_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"


@dataclass(frozen=True)
class Stack:
    """Some memory at the peak, and who holds it.

    Attributes:
        frames: The outermost first: line of the script, parts of the module's path, operator.
        kind: What it is held for.
        held_bytes: Its bytes, in ``tensors`` storages.
    """

    frames: tuple[str, ...]
    kind: Kind
    held_bytes: int
    tensors: int


def stacks(timeline: Timeline) -> list[Stack]:
    """Return the stacks of the peak, the largest first: their bytes add up to it."""
    return [
        Stack(tuple(frames_of(holder)), holder.kind, holder.held_bytes, holder.tensors)
        for holder in timeline.holders
        if holder.kind != "host" and holder.held_bytes
    ]


def frames_of(holder: Holds) -> list[str]:
    """Return the frames of a stack, as of :class:`Stack`."""
    lines = [holder.line] if holder.line else []
    if holder.module == OTHER:
        return [*lines, f"small tensors: {TITLES[holder.kind]}"]
    shown = display_holder(holder)
    modules = holder.module.split(".") if shown == holder.module else [shown]
    return [*lines, *modules, f"{holder.operator} ({TITLES[holder.kind]})"]


def speedscope(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return the peaks of titled timelines as profiles in bytes, in the file format of speedscope."""
    frames: dict[str, int] = {}
    profiles: list[dict[str, Any]] = []
    for title, timeline in timelines:
        found = stacks(timeline)
        profiles.append(
            {
                "type": "sampled",
                "name": f"Peak of {title}",
                "unit": "bytes",
                "startValue": 0,
                "endValue": timeline.peak_bytes,
                "samples": [[frames.setdefault(name, len(frames)) for name in each.frames] for each in found],
                "weights": [each.held_bytes for each in found],
            }
        )
    shared = {"frames": [{"name": name} for name in frames]}
    return _text({"$schema": _SPEEDSCOPE, "shared": shared, "profiles": profiles, "exporter": "actbench"})


def perfetto(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return the memory over steps as counters in Chrome's trace format, which Perfetto reads: a process for each step.

    Slices are the parts of the step, and the modules that make memory within them. A microsecond stands for an
    allocation or a free.
    """
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines, start=1):
        at = {"pid": process, "tid": 1}
        events.append({"ph": "M", "name": "process_name", **at, "args": {"name": title}})
        ends = [*timeline.spans, None]
        for span, following in pairwise(ends):
            assert span is not None
            end = timeline.events if following is None else following.start
            events.append({"ph": "X", "name": span.phase, "ts": span.start, "dur": end - span.start, **at})
        for each in timeline.modules:  # of equal length, the one that comes first is around the other
            name = each.module.rpartition(".")[2]
            where = {"ts": each.start, "dur": each.end - each.start, **at}
            events.append({"ph": "X", "name": name, **where, "args": {"module": each.module}})
        for place, moment in enumerate(timeline.moments):
            held = {TITLES[kind]: amounts[place] for kind, amounts in timeline.held_bytes.items() if kind != "host"}
            events.append({"ph": "C", "name": "memory (bytes)", "ts": moment, **at, "args": held})
        peak = {"ph": "i", "name": "peak", "ts": timeline.peak_event, "s": "p"}
        events.append({**peak, **at, "args": {"bytes": timeline.peak_bytes}})
    return _text({"traceEvents": events})


def _text(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n"
