"""What a training script leaves on its device with each step."""

from __future__ import annotations

from actbench.model.data import Data
from actbench.units import NonNegativeInt, PositiveInt


class Growth(Data):
    """Memory that each step of a script leaves on its device for good.

    Attributes:
        step_bytes: How much each step leaves, at least.
        more_steps: After how many more steps the device is full; None if nobody knows its memory.
        line: The line of the script that made most of it, if it is known.
    """

    step_bytes: PositiveInt
    more_steps: NonNegativeInt | None = None
    line: str | None = None
