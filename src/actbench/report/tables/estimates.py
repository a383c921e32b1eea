"""Notes about estimated times: their device, and the operators that are counted roughly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from actbench.model.estimated import EstimatedTime
from actbench.model.measured import MeasuredRecord, Measurement


def about_estimates(records: Sequence[MeasuredRecord]) -> Iterator[str]:
    """Yield notes: what ``est.`` means, which operators are counted roughly, and why a time is missing."""
    found = [(record.case, record.outcome) for record in records if isinstance(record.outcome, Measurement)]
    timed = [(case, measured.estimated) for case, measured in found if measured.estimated]
    written = [case for case, measured in found if measured.generated and measured.generated.token_seconds]
    if timed or written:
        devices = dict.fromkeys(case.device_profile or "" for case in (*(case for case, _ in timed), *written))
        yield f"est.: a time by the cost model for {', '.join(devices)}, not measured; see docs/time.md."
    yield from about_unknown(time for _, time in timed)
    for device, name in dict.fromkeys((case.device_profile, name) for case, time in timed for name in time.replaced):
        yield (
            f"{device} has no units for {name}: its products are timed at the rate of float32"
            f"{', in which cuBLAS computes them; take float16 there' if name == 'bfloat16' else ''}."
        )
    yield from dict.fromkeys(measured.untimed for _, measured in found if measured.untimed)


def about_unknown(times: Iterable[EstimatedTime | None]) -> Iterator[str]:
    """Yield a note if the cost model does not know some operators."""
    if unknown := dict.fromkeys(name for time in times if time for name in time.unknown):
        yield f"Operators that the cost model does not know are counted by their bytes: {', '.join(unknown)}."
