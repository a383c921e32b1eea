"""Measuring what a fit found on the device that it was found for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actbench.errors import MeasurementError
from actbench.experiments.recipes.sections import Planned
from actbench.experiments.runner import runner
from actbench.experiments.runner.progress import Progress
from actbench.measuring import meters
from actbench.measuring.meters.profiles import DeviceProfile
from actbench.results.fits import FitRecord
from actbench.results.measured import MeasuredRecord
from actbench.results.records import Case, Data, MeterName, Record
from actbench.results.store import Store

MOST = 3
"""Stacks that are measured, at most."""


def meter_of(profile: DeviceProfile) -> MeterName:
    """Return the meter that measures what a profile stands for.

    Raises:
        MeasurementError: This machine has no such device.
    """
    name: MeterName = "cuda" if profile.is_cuda else "cpu"
    try:
        meters.check(name)
    except MeasurementError:
        raise MeasurementError(
            f"--measure: {profile.name} is a CUDA device, and torch sees none here; leave --measure out, or give the "
            "same command on a machine that has one ('actbench doctor' says what is missing)"
        ) from None
    return name


@dataclass(frozen=True)
class _AsFits:
    """Takes records of measured cases into a file of fits."""

    store: Store[FitRecord]
    simulated: dict[Case, FitRecord]

    def done(self, case: Data) -> bool:
        """Whether the case needs no measuring."""
        return self.store.done(case)

    def failed(self, case: Data) -> bool:
        """Whether the case is done and failed."""
        return self.store.failed(case)

    def append(self, record: MeasuredRecord) -> None:
        """Store a record, with what was asked for and what its stack does to training."""
        beside = self.simulated[record.case]
        fields = {name: getattr(record, name) for name in Record.model_fields}
        self.store.append(FitRecord(**fields, asked=beside.asked, training=beside.training))


def measure(
    chosen: Sequence[FitRecord],
    meter: MeterName,
    store: Store[FitRecord],
    *,
    command: str,
    timeout_seconds: float | None,
    progress: Progress,
) -> tuple[Case, ...]:
    """Measure what was simulated, as far as the store does not hold it, and return the cases that were measured.

    Args:
        chosen: Simulated stacks.
        meter: Of the device that they were simulated for.
        store: Where the records go, beside those of the simulations.
        command: What the user can type to have the same.
        timeout_seconds: That one case may take.
        progress: Told what happens.

    Raises:
        MeasurementError: The processes cannot be started at all.
        StoreError: A record cannot be stored.
    """
    simulated = {record.case.model_copy(update={"meter": meter}): record for record in chosen}
    if simulated:
        runner.run(
            [Planned(case) for case in simulated],
            _AsFits(store, simulated),
            recipe=chosen[0].recipe,
            command=command,
            timeout_seconds=timeout_seconds,
            retry_failed=True,  # another program may have held the memory
            progress=progress,
        )
    return tuple(simulated)
