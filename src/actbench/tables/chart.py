"""Charts: curves that are drawn elsewhere, as a table's rows are."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: What it is called in the legend.
        points: ``(x, y)`` from left to right; a y that is no finite number is a gap.
        spread: Half the height of a band around the line, one for each point; empty for none.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    spread: tuple[float, ...] = ()

    def lone(self) -> tuple[tuple[float, float], ...]:
        """Return the points that have no neighbour to draw a line to, and so are drawn as dots."""
        seen = [False, *(math.isfinite(y) for _, y in self.points), False]
        found = zip(self.points, seen[:-2], seen[1:-1], seen[2:], strict=True)
        return tuple(point for point, before, here, after in found if here and not (before or after))


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes.

    Attributes:
        title: What the chart shows.
        x: What the horizontal axis counts.
        y: What the vertical axis is.
        curves: In the order of the legend.
    """

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
