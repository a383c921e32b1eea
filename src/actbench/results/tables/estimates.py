"""Notes about estimated times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actbench.results.measured import MeasuredRecord, Measurement


def about_estimates(records: Sequence[MeasuredRecord]) -> Iterator[str]:
    """Yield notes: what ``est.`` means, which operators are counted roughly, and why a time is missing."""
    found = [(record.case, record.outcome) for record in records if isinstance(record.outcome, Measurement)]
    timed = [(case, measured.estimated) for case, measured in found if measured.estimated]
    if timed:
        devices = dict.fromkeys(case.device_profile or "" for case, _ in timed)
        yield f"est.: a time by the cost model for {', '.join(devices)}, not measured; see docs/time.md."
    unknown = dict.fromkeys(name for _, time in timed for name in time.unknown)
    if unknown:
        yield f"Operators that the cost model does not know are counted by their bytes: {', '.join(unknown)}."
    yield from dict.fromkeys(measured.untimed for _, measured in found if measured.untimed)
