from __future__ import annotations

import pytest

from actbench.errors import UsageError
from actbench.report.compare import Limit, parse_limit


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("peak:5%", Limit("peak:5%", "peak", "worse", 0.05)),
        ("throughput:10%", Limit("throughput:10%", "throughput", "worse", 0.1)),
        ("largest_batch:0%", Limit("largest_batch:0%", "largest_batch", "worse", 0.0)),
        ("activations:2.5%", Limit("activations:2.5%", "activations", "worse", 0.025)),
        ("peak:>8GiB", Limit("peak:>8GiB", "peak", ">", 8 * 1024**3)),
        ("peak : > 8 GiB", Limit("peak : > 8 GiB", "peak", ">", 8 * 1024**3)),
        ("throughput:<90.5", Limit("throughput:<90.5", "throughput", "<", 90.5)),
    ],
)
def test_limits_are_read(text: str, limit: Limit) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "write QUANTITY:BOUND, with a quantity of peak, activations, throughput, largest_batch"),
        ("peak", "write QUANTITY:BOUND"),
        ("peak>8GiB", "write QUANTITY:BOUND"),
        ("speed:5%", "write QUANTITY:BOUND"),
        ("peak:", "'' is neither a share such as 5% nor a bound"),
        ("peak:5", "'5' is neither a share"),
        ("peak:%", "'' is not a number"),
        ("peak:-5%", "'-5' is not a number"),
        ("peak:nan%", "'nan' is not a number"),
        ("peak:1e400%", "'1e400' is not a number"),
        ("peak:>much", "'much' is not an amount of memory"),
        ("throughput:<fast", "'fast' is not a number"),
    ],
)
def test_what_is_no_limit_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_limit(text)

    assert str(caught.value).startswith(f"--fail-on {text!r}: ")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "before", "after", "broken"),
    [
        ("peak:25%", 100, 125, False),
        ("peak:25%", 100, 126, True),
        ("peak:25%", 100, 1, False),
        ("peak:0%", 0, 1, True),
        ("peak:0%", 0, 0, False),
        ("throughput:25%", 100, 75, False),
        ("throughput:25%", 100, 74, True),
        ("throughput:25%", 100, 900, False),
        ("largest_batch:0%", 8, 8, False),
        ("largest_batch:0%", 8, 7, True),
        ("largest_batch:0%", 0, 7, False),
        ("peak:>1KiB", None, 1024, False),
        ("peak:>1KiB", 5, 1025, True),
        ("throughput:<90", None, 89.9, True),
        ("peak:5%", None, 10, None),
    ],
)
def test_worse_follows_the_direction_of_the_quantity(
    text: str, before: float | None, after: float, broken: bool | None
) -> None:
    assert parse_limit(text).broken_by(before, after) is broken
