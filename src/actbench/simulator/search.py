"""The largest batch of a simulated case: predicted from the steps of two batches, then proved by simulated steps."""

from __future__ import annotations

from collections.abc import Callable

from actbench.measuring import search
from actbench.measuring.meters.meter import MemoryReading
from actbench.measuring.search import LARGEST_TRIED, BatchTrial
from actbench.model.measured import LargestBatch
from actbench.scheme.setup import TrainStep
from actbench.simulator.scaled import Ran, needed_bytes
from actbench.simulator.simulated import SimulatedMeter

Tried = Callable[[int, bool], object]
"""Told of each trial: its batch, and whether the step fits."""


def largest_batch(
    meter: SimulatedMeter,
    step: Callable[[int], TrainStep],
    batch_size: int,
    reading: MemoryReading,
    tried: Tried,
    most: int = LARGEST_TRIED,
) -> LargestBatch:
    """Return the largest batch that fits, or another size of a step that needs more as it grows.

    ``reading`` is that of the step of ``batch_size``, which ``meter`` has read last. No size beyond ``most`` is tried.
    """
    return _Search(meter, step, tried, most).result(batch_size, reading)


_MAX_PREDICTIONS = 3
"""How often the largest batch is predicted, each time from steps nearer to it, before steps alone find it."""


class _Search:
    def __init__(self, meter: SimulatedMeter, step: Callable[[int], TrainStep], tried: Tried, most: int) -> None:
        self._meter, self._step, self._tried, self._most = meter, step, tried, most
        self._limit = meter.memory_bytes
        self._trials: dict[int, BatchTrial] = {}
        self._ran: dict[int, Ran] = {}
        self._seconds: dict[int, float] = {}

    def result(self, batch_size: int, reading: MemoryReading) -> LargestBatch:
        self._note(batch_size, reading)
        fixed = (0, reading.weights_bytes + (reading.gradients_bytes or 0) + (reading.optimizer_bytes or 0))
        guess = search.predict(fixed, (batch_size, self._trials[batch_size].needed_bytes or 1), self._limit)
        for _ in range(_MAX_PREDICTIONS):
            batch = min(max(guess or 1, 1), self._most - 1)
            self._try(max(batch, 1) + (batch in self._trials))  # or its neighbour
            if self._predict():
                break
            first, second = self._nearest()
            guess = search.predict(first, second, self._limit)
        known = dict(self._trials)
        found = search.largest(self._try, memory_limit_bytes=self._limit, known=known, largest_tried=self._most)
        seconds = self._seconds.get(found.batch_size)
        return found.model_copy(update={"trials": len(self._trials) - 1, "estimated_step_seconds": seconds})

    def _predict(self) -> bool:
        """Predict the largest batch from the steps nearest to it and try that and its neighbour, if those are equal.

        Returns whether the neighbours prove the prediction.
        """
        one, other = ((batch, self._ran[batch]) for batch, _ in self._nearest())
        needed = needed_bytes(one, other, limit_bytes=self._limit)
        if needed is None:
            return False

        def fits(batch: int) -> BatchTrial:
            amount = needed(batch)
            return BatchTrial(amount <= self._limit, amount)

        most = {"memory_limit_bytes": self._limit, "largest_tried": self._most}
        predicted = search.largest(fits, known=self._trials, **most).batch_size
        at = predicted == 0 or self._try(predicted).fits
        neighbour = predicted + 1 if at else predicted - 1
        above = neighbour <= 0 or (neighbour <= self._most and self._try(neighbour).fits)
        return at is not above

    def _nearest(self) -> list[tuple[int, int]]:
        """Return the two batches whose bytes are nearest to the limit, with these."""
        needed = [(batch, trial.needed_bytes or 0) for batch, trial in self._trials.items()]
        return sorted(needed, key=lambda each: abs(self._limit - each[1]))[:2]

    def _try(self, batch: int) -> BatchTrial:
        if batch not in self._trials:
            self._note(batch, self._meter.memory(self._step(batch)))
            self._tried(batch, self._trials[batch].fits)
        return self._trials[batch]

    def _note(self, batch: int, found: MemoryReading) -> None:
        self._trials[batch] = BatchTrial(found.over_limit_bytes is None, found.peak_bytes, found.reserved_bytes)
        assert self._meter.ran is not None
        self._ran[batch] = self._meter.ran
        if found.estimated is not None:
            self._seconds[batch] = found.estimated.step_seconds
