"""Types of parameters of ``adam8bit``, which are checked before torch is imported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator


def short_name(library: Any) -> Any:
    """Return the short name of bitsandbytes; any other value as it is."""
    return "bnb" if library == "bitsandbytes" else library


Library = Annotated[Literal["torchao", "bnb"], BeforeValidator(short_name)]
