from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from actbench.measuring.search import LARGEST_TRIED, BatchTrial, largest, predict


class Steps:
    """Steps that fit up to an edge, with peaks by a formula; counts trials and forbids repeating one."""

    def __init__(self, edge, peak=None, tells_over_limit=True):
        self.edge, self.peak, self.tells_over_limit = edge, peak, tells_over_limit
        self.tried = []

    def __call__(self, batch):
        assert batch >= 1
        assert batch not in self.tried
        self.tried.append(batch)
        fits = batch <= self.edge
        tells = self.peak is not None and (fits or self.tells_over_limit)
        return BatchTrial(fits, self.peak(batch) if tells else None)


def affine(base, per_sample, limit, tells_over_limit=True):
    return Steps((limit - base) // per_sample, lambda batch: base + batch * per_sample, tells_over_limit)


edges = st.integers(0, LARGEST_TRIED - 1)


@given(edge=edges, predicted=st.none() | st.integers(0, 2 * LARGEST_TRIED))
def test_without_peaks_the_edge_is_found_and_proved_within_the_bound(edge, predicted):
    steps = Steps(edge)
    found = largest(steps, memory_limit_bytes=10, predicted=predicted)
    assert found.batch_size == edge
    assert found.next_outcome == "out-of-memory"
    assert edge + 1 in steps.tried
    assert edge == 0 or edge in steps.tried
    assert found.trials == len(steps.tried)
    start = 1 if predicted is None else min(max(predicted, 1), LARGEST_TRIED)
    assert found.trials <= 2 * math.log2(abs(edge - start) + 1) + 3


@given(
    edge=edges,
    predicted=st.none() | st.integers(1, LARGEST_TRIED),
    peaks=st.lists(st.none() | st.integers(0, 2**40), min_size=1, max_size=50),
)
def test_peaks_that_mislead_cost_trials_but_never_the_answer(edge, predicted, peaks):
    tried = []

    def fits(batch):
        tried.append(batch)
        return BatchTrial(batch <= edge, peaks[batch % len(peaks)])

    found = largest(fits, memory_limit_bytes=2**39, predicted=predicted)
    assert found.batch_size == edge
    assert edge + 1 in tried
    assert edge == 0 or edge in tried
    assert found.trials <= 6 * math.log2(LARGEST_TRIED)  # two lines for each stride: 20 that double, 20 that halve


@given(
    base=st.integers(0, 2**34),
    per_sample=st.integers(2**15, 2**31),
    room=st.integers(0, 2**34),
)
def test_peaks_on_a_line_need_four_trials_at_most(base, per_sample, room):
    limit = base + room + 1
    steps = affine(base, per_sample, limit)
    found = largest(steps, memory_limit_bytes=limit)
    assert found.batch_size == steps.edge
    assert found.trials <= 4
    assert found.next_outcome == "over-limit"
    assert found.next_peak_bytes == base + (steps.edge + 1) * per_sample


@given(base=st.integers(0, 2**34), per_sample=st.integers(2**15, 2**31), room=st.integers(2**31, 2**34))
def test_a_right_prediction_is_proved_in_two_trials(base, per_sample, room):
    steps = affine(base, per_sample, base + room, tells_over_limit=False)
    found = largest(steps, memory_limit_bytes=base + room, predicted=steps.edge)
    assert (found.batch_size, found.predicted, found.trials) == (steps.edge, steps.edge, 2)
    assert found.fits_peak_bytes == base + steps.edge * per_sample
    assert found.next_peak_bytes is None
    assert found.next_outcome == "out-of-memory"


@given(
    base=st.integers(0, 2**33),
    per_sample=st.integers(2**20, 2**28),
    noise=st.lists(st.integers(-512, 512), min_size=1, max_size=20),
    off=st.floats(0.8, 1.25),
)
def test_real_steps_near_a_line_with_a_poor_prediction_need_few_trials(base, per_sample, noise, off):
    limit = base + 300 * per_sample + per_sample // 2
    steps = affine(base, per_sample, limit, tells_over_limit=False)
    exact = steps.peak
    steps.peak = lambda batch: exact(batch) + noise[batch % len(noise)]
    found = largest(steps, memory_limit_bytes=limit, predicted=round(steps.edge * off))
    assert found.batch_size == 300
    assert found.trials <= 12


@given(answers=st.lists(st.booleans(), min_size=64, max_size=64), predicted=st.integers(1, 64))
def test_steps_that_are_not_monotone_still_end_on_a_proved_edge(answers, predicted):
    tried = {}

    def fits(batch):
        tried[batch] = batch <= 64 and answers[batch - 1]
        return BatchTrial(tried[batch], 100 * batch)

    found = largest(fits, memory_limit_bytes=3200, predicted=predicted)
    assert found.batch_size == 0 or tried[found.batch_size]
    assert not tried[found.batch_size + 1]


def test_nothing_fits():
    found = largest(Steps(0), memory_limit_bytes=100)
    assert (found.batch_size, found.fits_peak_bytes, found.trials) == (0, None, 1)


def test_everything_fits_up_to_the_cap_and_the_next_is_said_not_to_have_been_tried():
    found = largest(Steps(10**9), memory_limit_bytes=100, largest_tried=1000)
    assert (found.batch_size, found.next_outcome) == (1000, "not-tried")
    assert found.next_peak_bytes is None


def test_a_prediction_beyond_the_cap_is_tried_at_the_cap():
    steps = Steps(10**9)
    found = largest(steps, memory_limit_bytes=100, predicted=10**12)
    assert found.batch_size == LARGEST_TRIED
    assert steps.tried == [LARGEST_TRIED]
    assert found.predicted == 10**12


def test_known_trials_are_used_and_neither_repeated_nor_counted():
    steps = affine(1000, 10, 2005)
    found = largest(steps, memory_limit_bytes=2005, known={8: BatchTrial(True, 1080), 32: BatchTrial(True, 1320)})
    assert found.batch_size == (2005 - 1000) // 10
    assert steps.tried == [100, 101]
    assert found.trials == 2


def test_known_trials_can_be_the_whole_proof():
    found = largest(
        Steps(5), memory_limit_bytes=55, predicted=5, known={5: BatchTrial(True, 50), 6: BatchTrial(False, 60)}
    )
    assert (found.batch_size, found.trials, found.fits_peak_bytes, found.next_peak_bytes) == (5, 0, 50, 60)


def test_the_peak_at_which_an_allocator_gave_up_is_not_taken_for_the_peak_of_the_step():
    gave_up = BatchTrial(False, 90)
    steps = affine(0, 10, 105, tells_over_limit=False)
    found = largest(steps, memory_limit_bytes=105, known={16: gave_up, 1: BatchTrial(True, 10)})
    assert found.batch_size == 10
    assert found.next_outcome == "out-of-memory"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((1, 110), (3, 130), 40),
        ((3, 130), (1, 110), 40),
        ((50, 600), (1, 110), 40),
        ((1, 501), (2, 502), 0),
        ((1, 100), (2, 100), None),
        ((1, 100), (2, 90), None),
    ],
)
def test_predict_continues_the_line_through_two_peaks(first, second, expected):
    assert predict(first, second, 500) == expected
