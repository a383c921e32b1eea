"""Finds the largest batch in few trials, and proves it: the step fits at b and not at b + 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actbench.model.measured import LargestBatch

LARGEST_TRIED = 2**20
"""Larger batches are never tried: if a step still fits here, memory is not its limit."""

_PATIENCE = 2
"""How many lines in a row may fail to halve the interval before another kind of step, which surely shrinks it."""

_APART = 0.125
"""The share of a batch by which another one differs that shows what a sample takes."""


@dataclass(frozen=True)
class BatchTrial:
    """Whether the step at one batch size fits, and its peak, if known.

    ``reserved_bytes`` is what an allocator takes for the step, where that decides too; it is at least the peak.
    """

    fits: bool
    peak_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def needed_bytes(self) -> int | None:
        """The bytes that decide whether the step fits, if known."""
        return None if self.peak_bytes is None else max(self.peak_bytes, self.reserved_bytes or 0)


def predict(first: tuple[int, int], second: tuple[int, int], memory_limit_bytes: int) -> int | None:
    """Return the largest batch within the limit on the line through two ``(batch, bytes)``; None if it falls.

    A training step's peak is close to ``weights + batch * per_sample``, so two readings predict the answer.
    """
    (batch, peak), (other_batch, other_peak) = first, second
    run, rise = other_batch - batch, other_peak - peak
    if run * rise <= 0:
        return None
    return batch + (memory_limit_bytes - peak) * run // rise


def largest(
    fits: Callable[[int], BatchTrial],
    *,
    memory_limit_bytes: int,
    predicted: int | None = None,
    known: Mapping[int, BatchTrial] | None = None,
    largest_tried: int = LARGEST_TRIED,
) -> LargestBatch:
    """Find the largest batch that fits, and prove it by trials of this batch and the next larger one.

    The first trial is the prediction, or 1 if nothing is known. A line through known peaks gives the next trial.
    Without peaks, or if the line misleads, steps that double and then halve find the edge. Even if ``fits`` is not
    monotone (real allocators are noisy), the result fits and the next larger batch does not.

    Args:
        fits: Tries a batch; called at most once for each batch.
        memory_limit_bytes: The memory that a step may use.
        predicted: The predicted result.
        known: Earlier trials, which are not repeated and not counted.
        largest_tried: The largest batch to try; a result there has ``next_outcome="not-tried"``.
    """
    search = _Search(fits, memory_limit_bytes, dict(known or {}), largest_tried)
    if predicted is not None or not known:
        search.begin_at(min(max(predicted or 1, 1), largest_tried))
    while search.failing - search.fitting > 1:
        search.advance()
    return search.result(predicted)


class _Search:
    """The interval from the largest batch known to fit to the smallest known not to fit."""

    def __init__(
        self, fits: Callable[[int], BatchTrial], limit_bytes: int, trials: dict[int, BatchTrial], largest_tried: int
    ) -> None:
        self._fits = fits
        self._limit_bytes = limit_bytes
        self._trials = trials
        self._known = len(trials)
        self._stride = 1
        self._lines = 0
        self._upwards = True
        self.fitting = max((batch for batch, trial in trials.items() if trial.fits), default=0)
        above = (batch for batch, trial in trials.items() if not trial.fits and batch > self.fitting)
        self.failing = min(above, default=max(largest_tried, self.fitting) + 1)

    def begin_at(self, batch: int) -> None:
        """Try a batch, if it is inside the interval."""
        if self.fitting < batch < self.failing:
            self._try(batch)

    def advance(self) -> None:
        """Make one trial, which shrinks the interval."""
        width = self.failing - self.fitting
        guess = self._line() if self._lines < _PATIENCE else None
        if guess is None or not self.fitting <= guess < self.failing:
            # away from the last trial by a stride that doubles, and never passes the middle
            stride = min(self._stride, width // 2)
            self._stride *= 2
            self._try(self.fitting + stride if self._upwards else self.failing - stride)
            self._lines = 0
            return
        self._try(max(guess, self.fitting + 1))
        halved = 2 * (self.failing - self.fitting) <= width
        self._lines = 0 if halved else self._lines + 1

    def result(self, predicted: int | None) -> LargestBatch:
        """Return the result, once the interval has closed."""
        at, above = self._trials.get(self.fitting), self._trials.get(self.failing)
        over_limit = above is not None and (above.peak_bytes or 0) > self._limit_bytes
        return LargestBatch(
            batch_size=self.fitting,
            predicted=predicted,
            memory_limit_bytes=self._limit_bytes,
            fits_peak_bytes=None if at is None else at.peak_bytes,
            next_peak_bytes=None if above is None else above.peak_bytes,
            next_outcome="not-tried" if above is None else "over-limit" if over_limit else "out-of-memory",
            trials=len(self._trials) - self._known,
        )

    def _try(self, batch: int) -> None:
        trial = self._trials[batch] = self._fits(batch)
        if trial.fits:
            self.fitting = batch
        else:
            self.failing = batch
        self._upwards = trial.fits

    def _line(self) -> int | None:
        """Return the batch where the line through the peak nearest to the limit, and one apart, meets it, or None."""
        trials = ((batch, trial.fits, trial.needed_bytes) for batch, trial in self._trials.items())
        # An allocator that refused a step may report the bytes so far, which are not the peak that the step needs.
        peaks = [(b, peak) for b, fits, peak in trials if peak is not None and fits == (peak <= self._limit_bytes)]
        nearest = sorted(peaks, key=lambda point: abs(self._limit_bytes - point[1]))
        if len(nearest) < 2:
            # With one peak, count all of it as per sample: the prediction is then a bound on the near side of the edge.
            return predict((0, 0), nearest[0], self._limit_bytes) if nearest else None
        # Between neighbours a line shows the gaps that an allocator leaves, and not what a sample takes.
        apart = [point for point in nearest[1:] if abs(point[0] - nearest[0][0]) >= _APART * nearest[0][0]]
        return predict(nearest[0], (apart or nearest[1:])[0], self._limit_bytes)
