"""Measures a case that is a user's script; the runner opens its sessions in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actbench import longsteps
from actbench.errors import MeasurementError
from actbench.measuring.failures import failure_of as failure_of
from actbench.measuring.meters import profiles
from actbench.measuring.ranks import is_of_others as is_of_others
from actbench.measuring.ranks import join as join
from actbench.results.measured import Measurement
from actbench.results.records import Case
from actbench.script import launching
from actbench.script.real import RealRun
from actbench.script.simulation import Simulation
from actbench.script.steps import Step
from actbench.units import format_bytes

_NO_STEP = (
    "{} ended, and no optimizer of torch has stepped: does it train with these arguments? 'actbench run' reads training "
    "steps, which end with optimizer.step()"
)


class Session:
    """One script measured in this process.

    Attributes:
        tried: Told of each trial of a search for the largest batch.
    """

    def __init__(self, case: Case, *, timeline: bool = True) -> None:
        if case.script is None:
            raise MeasurementError(f"{case.name}: the case names no script")
        self.case, self.script = case, case.script
        self._wants_timeline = timeline
        self.tried: Callable[[int, bool], object] = lambda batch_size, fits: None

    def memory(self) -> Measurement:
        """Run the script until its steps are alike, and return what a step needs.

        Raises:
            ActbenchError: The script came to no step; see :func:`actbench.script.launching.run`.
        """
        torch.manual_seed(self.case.seed)
        run = self._opened()
        with run:
            launching.run(self.script)
        if not run.steps.done:
            raise MeasurementError(_NO_STEP.format(self.script.text))
        found = run.measurement
        return found if self._wants_timeline else found.model_copy(update={"timeline": None})

    def _opened(self) -> Simulation | RealRun:
        target = Path(self.script.target)
        options: dict[str, Any] = {
            "memory_limit_bytes": self.case.memory_limit_bytes,
            "steps": self.script.steps,
            "folder": Path.cwd() if self.script.is_module else target.resolve().parent,
            "script": None if self.script.is_module else target,
            "stepped": _tell,
        }
        if self.case.meter == "cpu":
            return RealRun(**options)
        return Simulation(
            profiles.get(self.case.device_profile or profiles.DEFAULT),
            raise_oom=self.script.raise_oom,
            processes=self.script.processes,
            **options,
        )

    def time(self, steps: int) -> None:
        """Return None: a script times its own steps, as far as they are computed."""


def _tell(number: int, step: Step) -> None:
    longsteps.tell(f"step {number}: peak {format_bytes(step.peak_bytes)}")
