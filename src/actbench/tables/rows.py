"""The rows of a table, kept as columns: of many rows that takes a small part of the memory of as many mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, overload

from actbench.tables.values import Value

Item = TypeVar("Item")

_AT_ONCE = 256


def blocks(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield a few hundred items at a time: what several columns read of them then is still in the processor's cache."""
    return (items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE))


class Rows(Sequence[Mapping[str, Value]]):
    """Rows that are made as they are asked for.

    Args:
        columns: The values of each column by its key, as many in each.
        count: How many rows there are.
    """

    def __init__(self, columns: Mapping[str, Sequence[Value]], count: int) -> None:
        self._columns = dict(columns)
        self._count = count

    def column(self, key: str) -> Sequence[Value]:
        """Return the values of a column from the first row to the last."""
        return self._columns[key]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Value]: ...
    @overload
    def __getitem__(self, place: slice) -> Rows: ...
    def __getitem__(self, place: int | slice) -> Mapping[str, Value] | Rows:
        if isinstance(place, slice):
            columns = {key: values[place] for key, values in self._columns.items()}
            return Rows(columns, len(range(self._count)[place]))
        place = range(self._count)[place]
        return {key: values[place] for key, values in self._columns.items()}

    def __iter__(self) -> Iterator[Mapping[str, Value]]:
        if not self._columns:
            return iter([{} for _ in range(self._count)])
        keys = tuple(self._columns)
        return (dict(zip(keys, values, strict=True)) for values in zip(*self._columns.values(), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Mapping.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]
