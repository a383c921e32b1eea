from __future__ import annotations

from actbench.model.measured import Measurement
from actbench.run.isolated import merged, slowest


def measured(peak: int, **fields: object) -> Measurement:
    return Measurement(weights_bytes=peak // 2, activation_bytes=1, peak_bytes=peak, **fields)


def test_the_rank_with_the_largest_peak_speaks_for_all() -> None:
    ranks = [
        measured(100, loss=1.0, warnings=("a",), reserved_bytes=300),
        measured(180, loss=3.0, warnings=("a", "b"), reserved_bytes=200, over_limit_bytes=4),
        measured(90, loss=5.0, over_limit_bytes=7),
    ]
    found = merged(ranks)

    assert (found.peak_bytes, found.weights_bytes, found.rank_peak_bytes) == (180, 90, (100, 180, 90))
    assert (found.reserved_bytes, found.over_limit_bytes, found.loss) == (300, 7, 3.0)
    assert found.warnings == ("a", "b")


def test_one_rank_is_itself() -> None:
    alone = measured(100, loss=1.0)

    assert merged([alone]) is alone


def test_each_step_is_as_slow_as_its_slowest_rank() -> None:
    assert slowest([(0.1, 0.4), (0.3, 0.2)]) == (0.3, 0.4)
    assert slowest([None, None]) is None
