"""What spans a grid of cases: one value, a list of values, or a range of batch sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from actbench.counts import COUNT_LIMIT
from actbench.errors import UsageError

MOST_BATCH_SIZES = 1000

_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})([+*])(\d{1,18})")


def parse_batch_range(text: str) -> tuple[int, ...]:
    """Read batch sizes: ``8``, ``8,16``, ``8-32+8`` (in steps of 8), ``8-512*2`` (doubling), or these with commas.

    A range holds its first value, and its last only when a step lands on it.

    Raises:
        UsageError: The text is none of these, or a size is 0 or stands twice.
    """
    sizes: list[int] = []
    for part in text.split(","):
        sizes.extend(_parse_part(part.strip(), text))
        if len(sizes) > MOST_BATCH_SIZES:
            raise UsageError(f"batch size {text!r} spans more than {MOST_BATCH_SIZES:,} sizes: take larger steps")
    if len(set(sizes)) < len(sizes):
        raise UsageError(f"batch size {text!r} holds the same size twice")
    return tuple(sizes)


def _parse_part(part: str, text: str) -> tuple[int, ...]:
    if part.isascii() and part.isdigit() and len(part) < 19 and int(part) > 0:
        return (int(part),)
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(
            f"batch size {text!r}: {part!r} is neither a size, such as 8, nor a range, such as 8-32+8 or 8-512*2"
        )
    first, last, step = int(match[1]), int(match[2]), int(match[4])
    if not 0 < first <= last:
        raise UsageError(f"batch size {text!r}: a range begins at 1 or more and ends at its beginning or after it")
    if step < (2 if match[3] == "*" else 1):
        raise UsageError(f"batch size {text!r}: a range never ends with the step {match[3]}{step}")
    return tuple(_steps(first, last, match[3], step))


def _steps(first: int, last: int, kind: str, step: int) -> Iterator[int]:
    size = first
    for _ in range(MOST_BATCH_SIZES + 1):
        if size > last:
            return
        yield size
        size = size * step if kind == "*" else size + step


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{value!r} stands twice")
        seen.add(value)
    return values


def _as_sizes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_batch_range(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


T = TypeVar("T")
Count = Annotated[int, Field(strict=True, gt=0, lt=COUNT_LIMIT)]
Axis = Annotated[tuple[T, ...], BeforeValidator(_as_tuple), Field(min_length=1), AfterValidator(_distinct)]
"""One value or a list of distinct values, read as a tuple."""
BatchSizes = Annotated[Axis[Count], BeforeValidator(_as_sizes)]
"""An axis that can also be written as a range."""
