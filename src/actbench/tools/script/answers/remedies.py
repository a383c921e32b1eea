"""What lets a step need less and costs nothing, with the bytes that it saves: from the events of the step.

Gradients of the step before that are freed as a step goes on could be freed before it begins. Those that are filled
with zeros could be dropped until the backward pass makes them. What is alive at the peak, and was used for the last
time before the pass of the peak began, as an output that a name still holds, could be freed by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from actbench.measuring.meters.peak import Event, alive, born
from actbench.measuring.meters.stepevents import Origin
from actbench.model.measured import Remedy, RemedyName, RunEvent
from actbench.tools.script.steps.counting import Step

_WORTH = 0.01
"""Share of the peak that a remedy has to save."""

_GAPS = 0.05
"""Share of the peak that the allocator has to lose for other settings of it to be tried."""


def of_step(
    step: Step,
    events: Sequence[Event],
    *,
    origins: Mapping[int, Origin],
    accumulated: Sequence[tuple[int, int]],
    used: Mapping[int, int] | None,
    others: Set[int],
) -> tuple[Remedy, ...]:
    """Return what lowers the peak of a step, each with what it saves after those before it.

    Args:
        step: The step.
        events: All events, later ones too.
        origins: Who made each storage.
        accumulated: Storages to which a backward pass added, with the moment.
        used: How many events there were when the last operator that read or wrote a storage had run, with its results;
            None if that is not known of all operators, as where compiled code ran.
        others: Names of weights, optimizer state and caches, and of what collectives use: they are left as they are.
    """
    at_peak = alive(events[: step.peak_at]).keys()
    before = alive(events[: step.begun]).keys() - others
    ends = {name: place for place, (name, amount) in enumerate(events) if not amount}  # a name is never used again
    gradients = before & step.gradients
    added: dict[int, int] = {}
    for name, place in accumulated:
        if name in gradients and step.begun <= place < step.updating:
            added.setdefault(name, place)
    dropped = {name: ends[name] for name in gradients if ends.get(name, step.updating) < step.updating}
    held: dict[tuple[RemedyName, str | None], dict[int, tuple[int, int]]] = {
        ("zero_grad", None): {name: (step.begun, end) for name, end in dropped.items()},
        ("set_to_none", None): {name: (step.begun, place) for name, place in added.items() if name not in dropped},
    }
    made = born(events[: step.peak_at])
    begun = max(at for each in (*step.forwards, (step.begun, step.updating)) for at in each if at <= step.peak_at)
    if used is None:
        return tuple(_saving(step, events, held))
    for name in at_peak - others - step.gradients:
        idle, end = used.get(name, made[name]), ends.get(name, step.ended)
        # what a backward pass frees belongs to it, and what is never freed may wait for a later step
        is_let_go = name in ends if name in before else end >= step.updating
        if idle < begun and is_let_go and (line := _line(origins, name)):
            held.setdefault(("del", line), {})[name] = idle + 1, end  # at ``idle`` that operator's results are new
    return tuple(_saving(step, events, held))


def _line(origins: Mapping[int, Origin], name: int) -> str:
    return origins[name].line if name in origins else ""


def _saving(
    step: Step, events: Sequence[Event], held: Mapping[tuple[RemedyName, str | None], Mapping[int, tuple[int, int]]]
) -> Iterator[Remedy]:
    """Yield remedies, largest first, from the moments between which each drops storages."""
    sizes: dict[int, int] = {}  # at the most: a storage grows, if at all, when it is made
    live = [0]
    bytes_of: dict[int, int] = {}
    for name, amount in events[: step.ended]:
        live.append(live[-1] + amount - bytes_of.get(name, 0))
        bytes_of[name] = amount
        sizes[name] = max(amount, sizes.get(name, 0))
    peak = whole = max(live[step.begun :])
    for (kind, line), spans in sorted(held.items(), key=lambda each: -sum(sizes[name] for name in each[1])):
        change: Counter[int] = Counter()
        for name, (begin, end) in spans.items():
            change[max(begin, step.begun)] -= sizes[name]
            change[end + 1] += sizes[name]
        dropped = 0
        for place in range(step.begun, step.ended + 1):
            dropped += change[place]
            live[place] += dropped
        now = max(live[step.begun :])
        if peak - now >= max(1, _WORTH * whole):  # 1 for a script that does not use the card
            yield Remedy(kind=kind, line=line, saved_bytes=peak - now)
            peak = now


def of_cache(
    whole: Sequence[RunEvent], emptied: Callable[[], Sequence[RunEvent]], evaluations: Sequence[str]
) -> tuple[Remedy, ...]:
    """Return what emptying the allocator's cache before and after evaluations saves of a whole run.

    Args:
        whole: What each part of the run needs.
        emptied: Returns the same of a run that empties its cache there.
        evaluations: The lines that begin evaluations.
    """
    if not evaluations or not whole:
        return ()
    needed = max(each.needed_bytes for each in whole)
    saved = needed - max(each.needed_bytes for each in emptied())
    if saved < max(1, _WORTH * needed):
        return ()
    return (Remedy(kind="empty_cache", line=" and ".join(evaluations), saved_bytes=saved),)


def of_allocator(reserved_bytes: int, peak_bytes: int, expandable: Callable[[], int]) -> tuple[Remedy, ...]:
    """Return what expandable segments save, where gaps between blocks are large.

    Args:
        reserved_bytes: What the allocator took.
        peak_bytes: The most bytes that were alive.
        expandable: Returns what it takes if its segments grow.
    """
    if reserved_bytes - peak_bytes < _GAPS * peak_bytes or (saved := reserved_bytes - expandable()) <= 0:
        return ()
    return (Remedy(kind="expandable_segments", saved_bytes=saved),) if saved >= _WORTH * reserved_bytes else ()
