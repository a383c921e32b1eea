"""Sentences on the peak of a step: its phase, its largest part, and how to lower it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from actbench.model.advice import FLAGS, PHASES, Settings, advice
from actbench.model.measured import OF_MODEL, MeasuredRecord, Measurement, PeakParts
from actbench.model.records import Case, Failure, Phase
from actbench.report.sentences import name_of, names_in, rows_of
from actbench.units import format_bytes

PARTS = {
    "activation_bytes": "saved activations",
    "batch_bytes": "the batch",
    "kept_bytes": "what the script keeps of earlier steps",
    "cache_bytes": "the cache",
    "engine_bytes": "the pool of the inference engine",
    "communication_bytes": "buffers of gathered and reduced tensors",
    "temporary_bytes": "temporaries",
}
"""Words for the fields of :class:`PeakParts` that come and go within a step."""


def about_peak(measured: Measurement, case: Case | None = None) -> str | None:
    """Return where the peak is, what fills it and what to do; None for older records, which lack these facts.

    ``case`` is what was measured: its own scheme is no example of what to do.
    """
    if measured.peak_phase is None:
        return None
    where = f"the peak is in the {PHASES[measured.peak_phase]}"
    mostly_model = False
    if measured.peak_parts is not None and measured.peak_bytes:
        name, most, mostly_model = _most(measured.peak_parts)
        where += f", {100 * most / measured.peak_bytes:.0f} % of it {name}"
    return f"{where}; {_advice(measured, measured.peak_phase, mostly_model, case)}"


def about_growth(rows: Iterable[tuple[MeasuredRecord, Measurement | None]]) -> Iterator[str]:
    """Yield why cases need more than the exact model, where the places that they change keep less.

    Args:
        rows: Records, each with the measurement of its exact model, if there is one.
    """
    grown: list[MeasuredRecord] = []
    rows = list(rows)
    for record, exact in rows:
        measured = record.outcome
        if exact is None or not isinstance(measured, Measurement) or measured.peak_bytes <= exact.peak_bytes:
            continue
        less = sum((site.bytes_before or 0) - (site.bytes_after or 0) for site in measured.sites)
        if less > 0 and measured.activation_bytes > exact.activation_bytes:
            grown.append(record)
    if grown:
        yield (
            f"{names_of(grown, [record for record, _ in rows])}: the changed places keep less for backward, but other "
            "layers keep the same tensors, so that what stands for them comes on top."
        )


def _advice(measured: Measurement, phase: Phase, mostly_model: bool, case: Case | None) -> str:
    used = names_in(case.scheme) if case else ()
    of_optimizer = measured.peak_parts is None or measured.peak_parts.are_of_optimizer(phase)
    settings = _settings_of_script(measured) if case and case.script else FLAGS
    return advice(
        phase,
        mostly_model=mostly_model,
        of_optimizer=of_optimizer,
        whole=_left_whole(measured),
        # older records have those that change the optimizer where it hardly matters
        examples=[name for name in measured.remedies if name not in used] if of_optimizer else (),
        settings=settings._replace(batch=None) if case and rows_of(case, measured) == 1 else settings,
    )


def _settings_of_script(measured: Measurement) -> Settings:
    """Return what a user can change of a script: its optimizer, and the batch by a flag if its loaders make batches."""
    in_script = Settings(batch="a smaller batch in the script", optimizer="another optimizer in the script")
    has_loader = measured.built is not None and measured.built.batch_size is not None
    return in_script._replace(batch=FLAGS.batch) if has_loader else in_script


def _left_whole(measured: Measurement) -> list[str]:
    """Return the kinds of modules whose weights the scheme did not store in fewer bits, if they fill half the peak."""
    found = [place for place in measured.unreached if place.weights_bytes]
    is_most = 2 * sum(place.weights_bytes or 0 for place in found) > measured.peak_bytes
    return list(dict.fromkeys(place.kind for place in found)) if is_most else []


def _most(parts: PeakParts) -> tuple[str, int, bool]:
    """Return what fills most of a peak, its bytes, and whether these do not depend on the batch."""
    if parts.are_mostly_model:
        return "weights, gradients and optimizer state", parts.model_bytes, True
    found = parts.model_dump()
    part = max(found.keys() - set(OF_MODEL), key=found.__getitem__)
    return PARTS[part], found[part], False


def over_limit_bytes(record: MeasuredRecord) -> int | None:
    """Return the bytes by which a case is over its limit, or None; older records have a failure with a peak."""
    outcome, limit = record.outcome, record.case.memory_limit_bytes
    if isinstance(outcome, Measurement):
        return outcome.over_limit_bytes
    if outcome.peak_bytes is None or limit is None or outcome.peak_bytes <= limit:
        return None
    return outcome.peak_bytes - limit


def about_limit(record: MeasuredRecord) -> str | None:
    """Return by how much a measured case is over its limit, and what to do; None if it fits or failed."""
    measured = record.outcome
    if isinstance(measured, Failure) or measured.over_limit_bytes is None or measured.memory_limit_bytes is None:
        return None
    limit, over = format_bytes(measured.memory_limit_bytes), format_bytes(measured.over_limit_bytes)
    why = about_peak(measured, record.case)
    if _only_gaps(measured):
        why = f"the peak fits, but its allocator loses memory between blocks{f'; {why}' if why else ''}"
    return f"{name_of(record.case, measured)}: over the limit of {limit} by {over}{f'; {why}' if why else ''}"


def _only_gaps(measured: Measurement) -> bool:
    """Return whether a step over its limit needs no more than it, but for gaps between blocks of the allocator."""
    return measured.peak_bytes <= (measured.memory_limit_bytes or 0)


_MOST_ALONE = 3  # rows over their limit with a sentence each; more share sentences


def about_limits(records: Sequence[MeasuredRecord]) -> list[str]:
    """Return what :func:`about_limit` says of each record; of many records, one sentence for each equal advice."""
    told = [(record, text) for record in records if (text := about_limit(record))]  # one with a timeline has no hash
    outcomes = [record.outcome for record, _ in told if isinstance(record.outcome, Measurement)]
    reserved = [_RESERVED] if any((each.reserved_bytes or 0) > each.peak_bytes for each in outcomes) else []
    if len(told) <= _MOST_ALONE:
        return [text for _, text in told] + reserved
    groups: dict[tuple[str, ...], list[MeasuredRecord]] = {}
    for record, _ in told:
        groups.setdefault(_alike(record), []).append(record)
    return [
        f"Too large{where} (limit {limit}): {names_of(rows, records)}{do}"
        for (limit, where, do), rows in groups.items()
    ] + reserved


_RESERVED = "Over limit counts what torch's allocator reserves: the peak, and the gaps between its blocks."


def _alike(record: MeasuredRecord) -> tuple[str, str, str]:
    """Return the limit, where the peak is and what to do, without figures that differ from row to row."""
    measured = record.outcome
    assert isinstance(measured, Measurement)
    limit = format_bytes(measured.memory_limit_bytes or 0)
    gaps = ", by what the allocator loses between blocks" if _only_gaps(measured) else ""
    if measured.peak_phase is None:
        return limit, gaps, ""
    mostly = measured.peak_parts is not None and _most(measured.peak_parts)[2]
    filled = ", mostly of weights, gradients and optimizer state" if mostly else ""
    do = _advice(measured, measured.peak_phase, mostly, record.case)
    return limit, f" in the {PHASES[measured.peak_phase]}{filled}{gaps}", f"; {do}"


_SIZES = attrgetter("meter", "rows", "sequence_length")


def names_of(records: Sequence[MeasuredRecord], table: Sequence[MeasuredRecord]) -> str:
    """Return the schemes of some rows of a table, each with what else distinguishes rows of it."""
    found: dict[str, set[tuple[Any, ...]]] = {}
    for case in (record.case for record in table):
        found.setdefault(case.model, set()).add(_SIZES(case))
    varies = {model: [len(set(values)) > 1 for values in zip(*sizes, strict=True)] for model, sizes in found.items()}
    names: dict[str, dict[str, None]] = {}
    for case in (record.case for record in records):
        meter, rows, tokens = (
            value if is_told else None for value, is_told in zip(_SIZES(case), varies[case.model], strict=True)
        )
        size = " of ".join(filter(None, (rows and f"batch {rows}", tokens and f"{tokens:,} tokens")))
        name = f"{case.model}, {case.scheme}" if len(found) > 1 else case.scheme
        names.setdefault(name, {})[", ".join(filter(None, (meter, size)))] = None
    return ", ".join(f"{name} ({', '.join(sizes)})" if any(sizes) else name for name, sizes in names.items())


_MOST_BOUNDS = 5  # records and JSON have all of them


def about_bounds(records: Sequence[MeasuredRecord]) -> Iterator[str]:
    """Yield why peaks are no more than upper bounds, or estimates, each reason once."""
    found = [record.outcome for record in records if isinstance(record.outcome, Measurement)]
    if estimated := dict.fromkeys(reason for measured in found for reason in measured.approximate):
        yield f"~: an estimated peak: {'; '.join(estimated)}."
    if reasons := list(dict.fromkeys(reason for measured in found for reason in measured.at_most)):
        more = f"; and {len(reasons) - _MOST_BOUNDS} more" if len(reasons) > _MOST_BOUNDS else ""
        told = "; ".join(reasons[:_MOST_BOUNDS])
        yield f"at most: a peak that only a real run would know exactly, because {told}{more}."


def needed_bytes(measured: Measurement) -> int:
    """Return the bytes of the device that a step needs: its peak, or the reserved bytes if known and larger."""
    return max(measured.peak_bytes, measured.reserved_bytes or 0)


def about_largest(records: Sequence[MeasuredRecord]) -> Iterator[str]:
    """Yield what largest batches are, and the memory that they were searched in, with its models where that differs."""
    limits: dict[str, dict[str, None]] = {}
    for record in records:
        outcome = record.outcome
        if isinstance(outcome, Measurement) and outcome.largest_batch is not None:
            searched = outcome.largest_batch_search
            limit = searched.memory_limit_bytes if searched else outcome.memory_limit_bytes
            memory = "its memory" if limit is None else format_bytes(limit)
            limits.setdefault(memory, {})[f"{record.case.model} ({record.case.meter})"] = None
    if limits:
        within = [memory if len(limits) == 1 else f"{memory} for {', '.join(limits[memory])}" for memory in limits]
        yield (
            f"Largest batch: what fits in {' and in '.join(within)}, found and proved. "
            "All other columns are of a step at Batch."
        )
