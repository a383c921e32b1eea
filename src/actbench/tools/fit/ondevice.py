"""Measuring the plans of a fit on the device that they are for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actbench.errors import MeasurementError
from actbench.measuring import meters
from actbench.model.data import Data
from actbench.model.measured import MeasuredRecord
from actbench.model.meters import MeterName
from actbench.model.records import Case, Record
from actbench.report.store import Store
from actbench.run import runner
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.simulator.profiles import DeviceProfile
from actbench.tools.fit.records import FitRecord, PlannedStep

MOST = 3
"""Most plans to measure."""

_VARIANTS = frozenset(("ti", "super", "d", "laptop", "max", "mobile", "nvl", "mig"))
"""Words in a driver's name of a card that make it another card."""


def meter_of(profile: DeviceProfile) -> MeterName:
    """Return the meter for a profile's device; a MeasurementError if this machine has none, or another card."""
    name: MeterName = "cuda" if profile.is_cuda else "cpu"
    try:
        meters.check_meter(name)
    except MeasurementError:
        raise MeasurementError(
            f"--measure: {profile.name} is a CUDA device, and torch sees none here; leave --measure out, or give the "
            "same command on a machine that has one ('actbench doctor' says what is missing)"
        ) from None
    if profile.is_cuda:
        _check_card(profile)
    return name


def _check_card(profile: DeviceProfile) -> None:
    """Check that a profile is of this machine's card, since its estimates are compared with measurements."""
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    is_own = profile.name.endswith(".toml")
    if capability != profile.compute_capability or not (is_own or _is_named(profile.name, name)):
        raise MeasurementError(
            f"--measure: the card of this machine is {_described(name, capability)}, and --device-profile "
            f"{profile.name} is {_described('another', profile.compute_capability)}; leave --measure out, "
            "give the same command on a machine that has that card, or name a profile of this one "
            "('actbench devices' lists them, 'actbench calibrate' writes one)"
        )


def _is_named(profile: str, card: str) -> bool:
    """Return whether a shipped profile has the name of a card: ``a100-40gb`` fits ``NVIDIA A100-SXM4-40GB``.

    A card without its memory in its name fits profiles of any memory.
    """
    wanted, given = (set(re.findall("[a-z0-9]+", name.lower())) for name in (profile, card))
    sizes = {word for word in wanted | given if re.fullmatch("[0-9]+gb", word)}
    if given & sizes and wanted & sizes and not wanted & given & sizes:
        return False
    return wanted - sizes <= given and given & _VARIANTS <= wanted


def _described(name: str, capability: tuple[int, int] | None) -> str:
    return f"{name} (compute capability {'.'.join(map(str, capability or ()))})"


@dataclass(frozen=True)
class _AsFits:
    """Stores records of measured cases in a file of fits."""

    store: Store[FitRecord]
    simulated: dict[Case, PlannedStep]
    path: None = None

    def done(self, case: Data) -> bool:
        """Whether the case was measured already."""
        return self.store.done(case)

    def failed(self, case: Data) -> bool:
        """Whether the case is done and failed."""
        return self.store.failed(case)

    def find(self, case: Data) -> FitRecord | None:
        """Return the record that counts for a case."""
        return self.store.find(case)

    def append(self, record: MeasuredRecord | FitRecord) -> None:
        """Store a record with the request of the fit and how its plan changes training."""
        beside = self.simulated[record.case].record
        fields = {name: getattr(record, name) for name in Record.model_fields}
        made = FitRecord(**fields, asked=beside.asked, training=beside.training)
        self.store.append(made.after(self.store.find(record.case)))


def measure(
    chosen: Sequence[PlannedStep],
    meter: MeterName,
    store: Store[FitRecord],
    *,
    command: str,
    timeout_seconds: float | None,
    progress: Progress,
) -> tuple[Case, ...]:
    """Measure simulated plans that the store has no measurement of, and return the measured cases.

    They are measured with all memory that was asked for.

    Raises:
        MeasurementError: The processes cannot be started.
        StoreError: A record cannot be stored.
    """
    simulated = {plan.case.model_copy(update={"meter": meter}): plan for plan in chosen}
    fits = _AsFits(store, simulated)
    if simulated:
        runner.run_plan(
            [Planned(case) for case in simulated],
            fits,
            recipe=chosen[0].record.recipe,
            command=command,
            timeout_seconds=timeout_seconds,
            retry_failed=True,  # another program may have used the memory
            progress=progress,
        )
    for case, plan in simulated.items():
        record = store.find(case)
        if record is not None and record.asked != plan.record.asked:  # measured for another request
            fits.append(record)
    return tuple(simulated)
