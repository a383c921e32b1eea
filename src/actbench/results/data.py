"""The base of all values that are read from or written to a file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Data(BaseModel):
    """A frozen value that is read from or written to a file; unknown fields are refused.

    NaN and infinity are written as strings and read back as numbers, since null means that nothing was measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")
