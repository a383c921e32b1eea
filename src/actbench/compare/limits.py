"""What ``compare --fail-on`` asks for: how much worse a quantity may get, or what it may not pass."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from actbench.errors import UsageError
from actbench.tables.columns import RESULTS, Column, change
from actbench.tables.entries import Entry
from actbench.tables.values import Unit
from actbench.units import parse_bytes

QUANTITIES: dict[str, Column[Entry]] = {
    name: next(column for column in RESULTS if column.key == key)
    for name, key in {
        "peak": "peak_bytes",
        "activations": "activation_bytes",
        "throughput": "samples_per_second",
        "largest_batch": "largest_batch",
    }.items()
}
"""The columns that can be compared and limited, by the name that ``--fail-on`` has for them."""


@dataclass(frozen=True)
class Limit:
    """A bound on one quantity.

    Attributes:
        text: As it was written.
        quantity: Key of :data:`QUANTITIES`.
        kind: ``worse``: the share by which it may get worse; ``>`` or ``<``: a value that it may not pass.
        amount: The share, or the value in base units.
    """

    text: str
    quantity: str
    kind: Literal["worse", ">", "<"]
    amount: float

    def broken_by(self, before: float | None, after: float) -> bool | None:
        """Whether a change breaks the limit; None when there is nothing before it to compare with.

        Args:
            before: The value of the first file, or None.
            after: The value of the second.
        """
        if self.kind != "worse":
            return after > self.amount if self.kind == ">" else after < self.amount
        if before is None:
            return None
        lower_is_better = QUANTITIES[self.quantity].better == "lower"
        if before == 0:
            return lower_is_better and after > 0
        grown = change(before, after) or 0.0
        worse = grown if lower_is_better else -grown
        return worse > self.amount and not math.isclose(worse, self.amount, abs_tol=1e-12)  # 1.05 - 1 is above 0.05


def parse_limit(text: str) -> Limit:
    """Read ``peak:5%`` (more than 5 % worse fails), ``largest_batch:0%``, ``peak:>8GiB`` or ``throughput:<90``.

    Raises:
        UsageError: The text does not follow this grammar; the message shows what is allowed.
    """
    quantity, colon, bound = (part.strip() for part in text.partition(":"))
    if not colon or quantity not in QUANTITIES:
        raise UsageError(f"--fail-on {text!r}: write QUANTITY:BOUND, with a quantity of {', '.join(QUANTITIES)}")
    if bound[:1] in ("<", ">"):
        amount = _amount(bound[1:].strip(), QUANTITIES[quantity].unit, text)
        return Limit(text, quantity, ">" if bound[0] == ">" else "<", amount)
    if not bound.endswith("%"):
        raise UsageError(f"--fail-on {text!r}: {bound!r} is neither a share such as 5% nor a bound such as >8GiB")
    return Limit(text, quantity, "worse", _number(bound[:-1].strip(), text) / 100)


def _amount(bound: str, unit: Unit, text: str) -> float:
    if unit != "bytes":
        return _number(bound, text)
    try:
        return parse_bytes(bound)
    except UsageError as error:
        raise UsageError(f"--fail-on {text!r}: {error}") from None


def _number(bound: str, text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", bound) or not math.isfinite(float(bound)):
        raise UsageError(f"--fail-on {text!r}: {bound!r} is not a number of 0 or more")
    return float(bound)
