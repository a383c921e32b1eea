"""How large numbers from outside may be, and the types of fields that hold counts."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

COUNT_LIMIT: Final = 2**63
"""What is counted, in bytes too, and what seeds generators, stays below: torch counts in signed 64 bits."""
LONGEST_SECONDS: Final = 1e7
"""Seconds that anything may be asked to take: 115 days."""

NonNegativeInt = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]
PositiveInt = Annotated[int, Field(gt=0, lt=COUNT_LIMIT)]
SignedInt = Annotated[int, Field(gt=-COUNT_LIMIT, lt=COUNT_LIMIT)]
