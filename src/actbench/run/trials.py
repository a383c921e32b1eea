"""Finding the largest batch of a case on a real device, each trial in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

from actbench.measuring import search
from actbench.model.measured import LARGEST_THAT_FITS, UNKNOWN_LARGEST, LargestBatch, Measurement, Outcome
from actbench.model.records import Case, Failure
from actbench.report.sentences import rows_of
from actbench.run.isolated import Open
from actbench.run.progress import Progress


class _UndecidedError(Exception):
    """There is no telling the largest batch; the message says why."""


@dataclass(frozen=True)
class Trials:
    """Finds largest batches on an idle device; ``memory_bytes`` limits a step whose case sets no limit."""

    open: Open
    memory_bytes: int | None
    progress: Progress

    def add_largest_batch(self, case: Case, outcome: Outcome) -> Outcome:
        """Return a case's outcome with its largest batch, or with the reason why there is none.

        A measurement, one over its limit too, gets it as a number, or a warning. A case that ran out of memory stays
        failed, with the largest batch that fits in its message.
        """
        self.progress.searching(case)
        try:
            found = self._search(case, outcome)
        except _UndecidedError as undecided:
            why = f"{UNKNOWN_LARGEST}: {undecided}"
            if isinstance(outcome, Failure):
                return _explained(outcome, why)
            return outcome.model_copy(update={"warnings": (*outcome.warnings, why)})
        if isinstance(outcome, Failure):
            return _explained(outcome, f"{LARGEST_THAT_FITS} {found.batch_size}")
        return outcome.model_copy(update={"largest_batch": found.batch_size, "largest_batch_search": found})

    def _search(self, case: Case, outcome: Outcome) -> LargestBatch:
        limit = case.memory_limit_bytes or self.memory_bytes
        if limit is None:
            raise _UndecidedError("the memory of the device cannot be read; give --memory-limit")
        return search.largest(
            lambda batch_size: self._try(case, batch_size, limit),
            memory_limit_bytes=limit,
            predicted=self._predict(case, limit),
            known={rows: _trial(outcome)} if (rows := rows_of(case, outcome)) else {},
        )

    def _predict(self, case: Case, limit: int) -> int | None:
        simulated = {
            "meter": "simulated",
            "device_profile": "cpu" if case.meter == "cpu" else case.device_profile,
            "memory_limit_bytes": limit,
            "gradient_quality": False,
        }
        # The search does not need a batch, and the case's own may be too much for a simulation.
        outcome = self._memory(case.with_batch(1).model_copy(update=simulated))
        if isinstance(outcome, Failure):
            self.progress.message(f"no prediction of the largest batch: {outcome.message}")
            return None
        return outcome.largest_batch

    def _try(self, case: Case, batch_size: int, limit: int) -> search.BatchTrial:
        alone = {
            "memory_limit_bytes": limit,
            "find_largest_batch": False,
            "gradient_quality": False,
        }
        outcome = self._memory(case.with_batch(batch_size).model_copy(update=alone))
        if isinstance(outcome, Failure) and outcome.reason != "out-of-memory":
            raise _UndecidedError(f"the step at batch {batch_size} ended in {outcome.reason}: {outcome.message}")
        trial = _trial(outcome)
        self.progress.tried(case, batch_size, trial.fits)
        return trial

    def _memory(self, case: Case) -> Measurement | Failure:
        with self.open(case, is_trial=True) as session:
            return session.memory()


def _trial(outcome: Outcome) -> search.BatchTrial:
    if isinstance(outcome, Failure):
        return search.BatchTrial(False, outcome.peak_bytes)
    return search.BatchTrial(outcome.fits, outcome.peak_bytes, outcome.reserved_bytes)


def _explained(failure: Failure, why: str) -> Failure:
    return failure.model_copy(update={"message": f"{failure.message}; {why}"})
