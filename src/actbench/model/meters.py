"""The names of meters."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from actbench import plugins

METERS: Final = ("simulated", "cpu", "cuda")
"""The meters of actbench itself."""


def _known(name: str) -> str:
    """Refuse a meter that no installed package brings, with the names of all that there are."""
    names = plugins.installed("meters")
    if name not in names:
        # those of actbench stand in the order of its documentation
        *first, last = (repr(each) for each in [*METERS, *(other for other in names if other not in METERS)])
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(first)} or {last}"})
    return name


MeterName = Annotated[str, AfterValidator(_known)]
"""The name of a meter: that of an entry point of ``actbench.meters``."""
