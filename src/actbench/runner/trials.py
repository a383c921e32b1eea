"""The largest batch of a case on a real device: predicted by simulation, proved by steps in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass

from actbench import search
from actbench.records import Case, Failure, Measurement
from actbench.runner.isolated import IsolatedSession
from actbench.runner.processes import ForkServer
from actbench.runner.progress import Progress


class _UndecidedError(Exception):
    """A trial ended in something else than fitting or running out of memory."""

    def __init__(self, batch_size: int, failure: Failure) -> None:
        super().__init__(batch_size)
        self.batch_size = batch_size
        self.failure = failure


@dataclass(frozen=True)
class Trials:
    """Finds largest batches on a device that nothing else uses meanwhile.

    Attributes:
        server: Where the process of each trial is forked.
        memory_bytes: Memory that a step may use where its case sets no limit; None where that is unknown.
        timeout_seconds: Time that each trial may take.
        progress: Told of each trial.
    """

    server: ForkServer
    memory_bytes: int | None
    timeout_seconds: float | None
    progress: Progress

    def add_largest_batch(self, case: Case, measured: Measurement) -> Measurement:
        """Return a case's measurement with its largest batch, or with a warning that says why there is none."""
        limit = case.memory_limit_bytes or self.memory_bytes
        if limit is None:
            return _warned(measured, "the memory of the device cannot be read; give --memory-limit")
        try:
            found = search.largest(
                lambda batch_size: self._try(case, batch_size),
                memory_limit_bytes=limit,
                predicted=self._predict(case, limit),
                known={case.batch_size: search.Trial(True, measured.peak_bytes)},
            )
        except _UndecidedError as undecided:
            failure = undecided.failure
            why = f"the step at batch {undecided.batch_size} ended in {failure.reason}: {failure.message}"
            return _warned(measured, why)
        return measured.model_copy(update={"largest_batch": found.batch_size, "largest_batch_search": found})

    def _predict(self, case: Case, limit: int) -> int | None:
        simulated = {
            "meter": "simulated",
            "device_profile": "cpu" if case.meter == "cpu" else case.device_profile,
            "memory_limit_bytes": limit,
            "gradient_quality": False,
        }
        outcome = self._memory(case.model_copy(update=simulated))
        if isinstance(outcome, Failure):
            self.progress.message(f"no prediction of the largest batch: {outcome.message}")
            return None
        return outcome.largest_batch

    def _try(self, case: Case, batch_size: int) -> search.Trial:
        alone = {"batch_size": batch_size, "find_largest_batch": False, "gradient_quality": False}
        outcome = self._memory(case.model_copy(update=alone))
        if isinstance(outcome, Failure) and outcome.reason != "out-of-memory":
            raise _UndecidedError(batch_size, outcome)
        trial = search.Trial(isinstance(outcome, Measurement), outcome.peak_bytes)
        self.progress.tried(case, batch_size, trial.fits)
        return trial

    def _memory(self, case: Case) -> Measurement | Failure:
        with IsolatedSession(self.server, case, self.timeout_seconds) as session:
            return session.memory()


def _warned(measured: Measurement, why: str) -> Measurement:
    return measured.model_copy(update={"warnings": (*measured.warnings, f"the largest batch is unknown: {why}")})
