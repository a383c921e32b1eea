"""The last lines of ``actbench run``: whether the script fits, what helps best, and how large a batch fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import Final

from actbench.model.measured import Advised, MeasuredRecord, Measurement
from actbench.model.records import Case
from actbench.report.sentences import rows_of
from actbench.tools.script.answers.suggestions import free_remedies, run_bytes, suggestions
from actbench.tools.script.answers.verdict import in_short
from actbench.units import format_bytes, format_seconds

WORTH_SECONDS: Final = 20.0
"""Time that each simulation for the answer may take; others are left to a command of their own."""

SEARCH_SECONDS: Final = 2 * WORTH_SECONDS
"""Time that a search for the largest batch may take."""

Command = Callable[..., str]
"""Returns the command that was typed, with more options before the script."""


def answer(record: MeasuredRecord, command: Command) -> list[str]:
    """Return the last lines about an unchanged script, the worst that is known of it first; none of a failed one."""
    measured = record.outcome
    if not isinstance(measured, Measurement):
        return []
    remedy = _remedy(record.case, measured, command)
    return [*judged(record), *remedy, *_largest(record, measured, command)]


def judged(record: MeasuredRecord) -> list[str]:
    """Return whether a script fits, with what helps most of what costs nothing."""
    measured = record.outcome
    if not isinstance(measured, Measurement):
        return []
    return [*in_short(record), *(f"Free of cost: {each}." for each in free_remedies(measured)[:1])]


def _remedy(case: Case, measured: Measurement, command: Command) -> Iterator[str]:
    known, found = measured.advised or Advised(), suggestions(measured)
    if not found:
        return
    if known.scheme is None or known.needed_bytes is None:
        scheme, reason = found[0].scheme, found[0].reason
        if known.is_slow:
            limit = WORTH_SECONDS if known.limit_seconds is None else known.limit_seconds
            why = (
                f"a simulation takes more than {format_seconds(limit)}" if limit else "no time was left to simulate it"
            )
            yield f"{scheme} may help, {reason}; to see what it saves ({why}): {command(*_more_time(known))}"
        else:
            yield f"{scheme} may help, {reason}; to see what it saves: {command('--scheme', scheme)}"
        return
    from actbench.tools.fit.codegen import lines_for  # of what is stored, nothing is asked of torch

    saved = 1 - known.needed_bytes / run_bytes(measured)
    lacks = f", {format_bytes(known.over_limit_bytes)} more than there is," if known.over_limit_bytes else ""
    time = ""
    if known.step_seconds and measured.estimated:
        time = f" and takes {known.step_seconds / measured.estimated.step_seconds:.2f} times as long (est.)"
    code = "; ".join(["import actbench", *lines_for(known.scheme, measured.optimizer)])
    whole = ", in the largest part of its run," if measured.events else ""
    needs = f"With {known.scheme} it needs{whole} {format_bytes(known.needed_bytes)}{lacks}"
    yield f"{needs} ({100 * saved:.0f} % less){time}: {code}"
    if lacks:
        yield from planning(case, measured)


def _largest(record: MeasuredRecord, measured: Measurement, command: Command) -> Iterator[str]:
    """Yield the largest batch, or the command that finds it; nothing where a script has no batch that can change."""
    case, known = record.case, measured.advised
    largest = measured.largest_batch if measured.largest_batch is not None else known and known.largest_batch
    rows = rows_of(case, measured)
    own = "" if rows is None else f" (it has {rows})"
    if largest is not None:
        what = "whose steps fit" if measured.events else "that fits"
        yield f"The largest batch {what} is {largest}{own}." if largest else "Not even a batch of one row fits."
        return
    has_loader = measured.built is not None and measured.built.batch_size is not None
    if case.script is None or case.meter == "cuda" or not has_loader:
        return
    is_slow = known is not None and known.is_search_slow
    slow = "a search did not end in its time"
    if known and known.fitting_batch:
        slow += f", in which {known.fitting_batch} rows fit{own}"
    if not case.script.whole:
        why, options = (f" ({slow})", _more_time(known)) if known and is_slow else ("", ("--max-batch",))
        yield f"To find the largest batch that fits, by more simulations{why}: {command(*options)}"
    elif is_slow:
        yield f"The largest batch whose steps fit is not known: {slow}; --max-batch in place of --whole finds it."


def _more_time(known: Advised) -> tuple[str, ...]:
    """Return the options that give an answer more time: that of the case, or more than it had with all of that."""
    longer = max(3600, 2 * round(known.limit_seconds or 0))
    return ("--full-answer", "--timeout", str(longer)) if known.is_full else ("--full-answer",)


def planning(case: Case, measured: Measurement) -> Iterator[str]:
    """Yield the command that plans for the script; none where fit can make no plan: it needs times of one card."""
    script = case.script
    if script is None or script.processes > 1 or measured.estimated is None:
        return
    limit = None if case.memory_limit_bytes is None else f"{case.memory_limit_bytes}B"
    named = {
        "--script": script.text,
        "--device-profile": case.device_profile,
        "--memory-limit": limit,
        "--batch-size": script.batch_size,
    }
    words = [str(word) for flag, value in named.items() if value is not None for word in (flag, value)]
    yield f"To plan schemes block by block: {shlex.join(['actbench', 'fit', *words])}"
