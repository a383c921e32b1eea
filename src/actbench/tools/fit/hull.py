"""Which of many ways to save bytes are worth their seconds: those on the lower hull of bytes against seconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Point = tuple[float, float]
"""Bytes and seconds."""


def lower_hull(points: Iterable[Point]) -> list[Point]:
    """Return the corners of the lower convex hull, from the fewest bytes to the fewest seconds."""
    corners: list[Point] = []
    for point in sorted(set(points)):
        if corners and point[1] >= corners[-1][1]:
            continue  # another one holds no more and is as fast
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def _is_above(first: Point, middle: Point, last: Point) -> bool:
    """Whether the middle of three points is on the line between the others, or above it."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0])


def near_hull(points: Mapping[Item, Point], most: int, slack: float = 0.0) -> list[Item]:
    """Return the items on the lower hull, and the next nearest to it, ``most`` in all or those within ``slack`` of it.

    Nearness is the share of the hull's seconds, above the fastest point, that an item takes more for its bytes.
    """
    corners = lower_hull(points.values())
    if not corners:
        return []
    span = max(corners[0][1] - corners[-1][1], 1e-12)
    gaps = {item: (seconds - _on_hull(corners, held)) / span for item, (held, seconds) in points.items()}
    nearest = sorted(points, key=lambda item: gaps[item])
    on_hull = [item for item in nearest if gaps[item] <= slack]
    return nearest[: max(most, len(on_hull))]


def _on_hull(corners: Sequence[Point], held: float) -> float:
    """Return the least seconds with which so many bytes are held, between the corners of a hull."""
    if held >= corners[-1][0]:
        return corners[-1][1]
    for (less, slow), (more, fast) in itertools.pairwise(corners):
        if less <= held <= more:
            return slow + (fast - slow) * (held - less) / (more - less)
    return corners[0][1]


def least_seconds(hulls: Sequence[tuple[Sequence[Point], int]], limit: float) -> float:
    """Return a lower bound of the seconds of blocks that hold at most ``limit`` bytes together; infinite if none can.

    ``hulls`` has the lower hull of each kind of block with their number. Fractions of blocks may change, the cheapest
    bytes first, as in the linear relaxation of the knapsack problem.
    """
    held = sum(corners[-1][0] * count for corners, count in hulls)
    seconds = sum(corners[-1][1] * count for corners, count in hulls)
    steps = [
        ((slow - fast) / (more - less), (more - less) * count)
        for corners, count in hulls
        for (less, slow), (more, fast) in itertools.pairwise(corners)
    ]
    for rate, saved in sorted(steps):
        if held <= limit:
            break
        taken = min(saved, held - limit)
        held, seconds = held - taken, seconds + rate * taken
    return seconds if held <= limit * (1 + 1e-12) + 1 else float("inf")
