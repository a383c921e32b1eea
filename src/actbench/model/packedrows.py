"""Rows of a batch that hold several sequences, one behind the other: ``512,1024,300``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_LENGTHS = re.compile(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})+")


def packed_row(value: str) -> str:
    """Return a text of at least two lengths as it is; a ValueError if it is none."""
    if not _LENGTHS.fullmatch(value):
        raise ValueError(f"{value!r} are no lengths of packed sequences: write two or more, as in 512,1024,300")
    return value


PackedRow = Annotated[str, AfterValidator(packed_row)]


def lengths(row: PackedRow) -> tuple[int, ...]:
    """Return the tokens of each sequence of a row."""
    return tuple(map(int, row.split(",")))
