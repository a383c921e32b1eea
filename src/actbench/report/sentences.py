"""Sentences about rows of a table, such as why they failed; rows that share a reason share its sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case, Failure, Record, named
from actbench.units import counted

ALL = "All rows"
"""How a sentence begins that is true of each row."""
SAME = "Same in all rows"
"""How a sentence begins that lists what is not a column, as each row has it."""

T = TypeVar("T")
Names = Callable[[Sequence[T]], str]
"""From rows to their names in a sentence."""


def rows_of(case: Case, outcome: Any) -> int | None:
    """Return the rows of a batch: those that a script was found to feed, or else those that the case says, if any."""
    built = getattr(outcome, "built", None)
    found: int | None = built.batch_size if built else None
    return found or case.rows


def name_of(case: Case, outcome: Any) -> str:
    """Return the name of a case for messages, with the batch that was found."""
    return named(case.shown_model, case.scheme, rows_of(case, outcome), case.meter)


def names_in(scheme: str) -> list[str]:
    """Return the names of the parts of a specification, that of an older record too."""
    return [part.partition(",")[0].partition(":")[0] for part in scheme.split("+")]


def without_name(text: str, scheme: str) -> tuple[str, str]:
    """Return the name of a part of a scheme that a text begins with, empty for none, and the rest of the text."""
    names = (scheme, *scheme.split("+"), *names_in(scheme))
    name = next((each for each in names if text.startswith(f"{each}: ")), "")
    return name, text[len(name) + 2 :] if name else text


def failures(rows: Iterable[tuple[T, str, Any]], names: Names[T], *, in_table: bool = True) -> list[str]:
    """Return why rows failed, each given with its scheme and its outcome; a reason that rows share is told once.

    It stands after the names of the rows; ``in_table``, after "All rows" where each of several rows failed for it.
    """
    whose: dict[str, list[T]] = {}
    rows = list(rows)
    for row, scheme, outcome in rows:
        if isinstance(outcome, Failure):
            _, message = without_name(" ".join(outcome.message.split()), scheme)
            whose.setdefault(f"{outcome.reason}: {message}", []).append(row)
    is_all = in_table and len(rows) > 1
    return [f"{ALL if is_all and len(of) == len(rows) else names(of)}: {text}" for text, of in whose.items()]


def why_none(records: Sequence[Record[Case, Any]]) -> list[str]:
    """Return why each case failed, once for all that share a reason; empty if a row has figures."""
    if not all(isinstance(record.outcome, Failure) and record.outcome.peak_bytes is None for record in records):
        return []
    told = failures(((record.case, record.case.scheme, record.outcome) for record in records), names_of_cases)
    return [text.removeprefix(f"{ALL}: ") for text in told]


def warnings(rows: Iterable[tuple[str, Iterable[str]]]) -> list[tuple[str, int]]:
    """Return the warnings of rows, each row given by its scheme, and in how many rows each of them is.

    What is the same but for the name of a scheme is one warning, after all of these names.
    """
    whose: dict[str, list[str]] = {}
    for scheme, texts in rows:
        for text in texts:
            name, rest = without_name(text, scheme)
            whose.setdefault(rest, []).append(name)
    return [
        (f"{', '.join(dict.fromkeys(names))}: {text}" if all(names) else text, len(names))
        for text, names in whose.items()
    ]


def names_of_cases(cases: Sequence[Case]) -> str:
    """Return the names of cases; of those that differ in the scheme only, one with all schemes."""
    schemes: dict[Case, list[str]] = {}
    for case in cases:
        schemes.setdefault(case.model_copy(update={"scheme": "exact"}), []).append(case.scheme)
    found = (case.model_copy(update={"scheme": ", ".join(these)}).name for case, these in schemes.items())
    return "; ".join(dict.fromkeys(found))


_MOST_CARDS = 3
"""Cards that a sentence names; more are counted."""


def measured_on(records: Iterable[MeasuredRecord]) -> list[str]:
    """Return sentences that name the machines and the versions of records: what was simulated ran on no card."""
    cards: dict[tuple[str, bool], dict[str, None]] = {}
    for record in records:
        machine, versions, is_simulated = record.machine, record.versions, record.case.meter == "simulated"
        gpu = None if is_simulated else machine.gpu  # simulations use none
        device = gpu or f"{machine.processor}, {counted(machine.cores, 'core')}"
        commit = f", commit {versions.commit[:7]}" if versions.commit else ""
        where = f"{machine.name} ({device}) with actbench {versions.actbench}{commit}, torch {versions.torch}."
        named = cards.setdefault((where, is_simulated), {})
        named |= {record.case.device_profile: None} if record.case.device_profile else {}
    return [
        f"{f'Simulated{_for(list(named))}' if is_simulated else 'Measured'} on {where}"
        for (where, is_simulated), named in cards.items()
    ]


def _for(cards: Sequence[str]) -> str:
    if len(cards) > _MOST_CARDS:
        return f" for {len(cards)} devices"
    return f" for {', '.join(cards)}" if cards else ""
