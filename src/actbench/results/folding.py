"""Places of a model that are alike but for numbers in their paths, told as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from actbench.results.records import Site, Unreached

T = TypeVar("T", Site, Unreached)


class _Folded(NamedTuple):
    names: tuple[str, ...]
    attributes: Hashable
    first: int
    times: int


def folded(places: Sequence[T]) -> list[tuple[T, int]]:
    """Return places, those alike as one with ``[first-last]`` in its path, as ``only=`` takes it, and how many it is.

    Places are alike if all but their paths is equal, and the paths differ in names that are consecutive numbers. Each
    stands where the first of its places stood.
    """
    rows = [
        _Folded(tuple(place.path.split(".")), tuple(place.model_dump(exclude={"path"}).items()), index, 1)
        for index, place in enumerate(places)
    ]
    for depth in range(max((len(row.names) for row in rows), default=0)):
        rows = sorted(_along(rows, depth), key=lambda row: row.first)
    return [(places[row.first].model_copy(update={"path": ".".join(row.names)}), row.times) for row in rows]


def _along(rows: Sequence[_Folded], depth: int) -> Iterator[_Folded]:
    """Yield rows, one for each run of consecutive numbers among the names at a depth."""
    groups: dict[Hashable, list[_Folded]] = {}
    for row in rows:
        if len(row.names) > depth and row.names[depth].isdecimal():
            around = row.names[:depth], row.names[depth + 1 :]
            groups.setdefault((around, row.attributes, row.times), []).append(row)
        else:
            yield row
    for group in groups.values():
        numbered = sorted((int(row.names[depth]), row) for row in group)
        for _, run in groupby(enumerate(numbered), lambda each: each[1][0] - each[0]):
            yield _as_one([each for _, each in run], depth)


def _as_one(run: Sequence[tuple[int, _Folded]], depth: int) -> _Folded:
    (low, row), (high, _) = run[0], run[-1]
    if len(run) == 1:
        return row
    names = (*row.names[:depth], f"[{low}-{high}]", *row.names[depth + 1 :])
    return row._replace(names=names, first=min(each.first for _, each in run), times=len(run) * row.times)
