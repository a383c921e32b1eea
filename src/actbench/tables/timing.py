"""What is made of the seconds of several steps: a median, the spread of the steps, and ratios of two of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A value and its spread; the spread is None where it is not known.

    Attributes:
        value: The median, or what was made of medians.
        spread: Half the interquartile range: half of the steps are within it of the median; or what was made of it.
    """

    value: float
    spread: float | None = None


def step_time(seconds: Sequence[float] | None) -> Spread | None:
    """Return the median step in seconds; one step alone has no spread."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return Spread(seconds[0])
    first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(middle, (third - first) / 2)


def throughput(batch_size: int, step: Spread | None) -> Spread | None:
    """Return samples a second; its relative spread is that of the step."""
    if step is None or step.value <= 0:
        return None
    rate = batch_size / step.value
    return Spread(rate, None if step.spread is None else rate * step.spread / step.value)


def ratio(above: Spread | None, below: Spread | None) -> Spread | None:
    """Return the quotient of two independent values: the squares of their relative spreads add up."""
    if above is None or below is None or above.value <= 0 or below.value <= 0:
        return None
    quotient = above.value / below.value
    if above.spread is None or below.spread is None:
        return Spread(quotient)
    return Spread(quotient, quotient * math.hypot(above.spread / above.value, below.spread / below.value))
