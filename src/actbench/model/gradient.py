"""How the gradient of a step with schemes compares with that of the exact step."""

from __future__ import annotations

from typing import Final, Literal, get_args

Gradient = Literal["exact", "unbiased", "approximate"]
"""Equal to rounding; right on average over the random numbers; or neither."""

GRADIENTS: Final[tuple[Gradient, ...]] = get_args(Gradient)
"""All of them, the best first."""
