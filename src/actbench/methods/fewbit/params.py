"""Types of parameters of ``fewbit``, which are checked before torch is imported."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema


def whole_number(value: Any) -> Any:
    """Return bits given as text or number; a ValueError if they are not 1 to 8."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if type(value) is not int or not 1 <= value <= 8:
        raise ValueError("must be a whole number from 1 to 8")
    return value


Bits = Annotated[int, BeforeValidator(whole_number), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 8})]
