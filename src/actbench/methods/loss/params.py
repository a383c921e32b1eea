"""Types of parameters of ``chunked_loss``, which are checked before torch is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import PositiveInt, ValidationError, WrapValidator


def number_or_liger(value: Any, read: Callable[[Any], Any]) -> Any:
    """Return what ``read`` makes of a value; a ValueError in one sentence if it is neither of the two."""
    try:
        return read(value)
    except ValidationError:
        raise ValueError(f"{value!r} is neither a number of pieces, at least 1, nor liger") from None


Pieces = Annotated[PositiveInt | Literal["liger"], WrapValidator(number_or_liger)]
