"""The estimated time of a simulated step. Amounts are in base units: bytes and seconds."""

from __future__ import annotations

from actbench.model.data import Data
from actbench.units import NonNegativeFloat, NonNegativeInt

OTHERS = "(others)"
"""Name of the sum of all operators of a step that are not named."""


class OperatorTime(Data):
    """The estimated time of the calls of one operator in a step.

    Attributes:
        name: Of the operator; in parentheses what is none: the device waits, or all that is not named.
        is_beside: Whether it runs beside what the device computes, as collectives do; its seconds are no part of the
            step's.
    """

    name: str
    calls: NonNegativeInt
    seconds: NonNegativeFloat
    flops: NonNegativeInt = 0
    moved_bytes: NonNegativeInt = 0
    is_beside: bool = False


class Communication(Data):
    """What one process sends to others in a step by one kind of collective.

    Attributes:
        kind: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all``, ``broadcast``, ``reduce`` or ``send``.
        sent_bytes: In rings: of what n processes gather or scatter (n - 1)/n, of what all of them add up twice that.
    """

    kind: str
    calls: NonNegativeInt
    sent_bytes: NonNegativeInt


class EstimatedTime(Data):
    """The estimated time of a simulated step on the simulated device; nothing of it was measured.

    Attributes:
        step_seconds: The sum of the next three.
        host_seconds: Time of the host to issue the operators; if that is longer, the device waits.
        device_seconds: Time in which the device computes.
        flops: Floating-point operations of the products.
        moved_bytes: Bytes that operators read and write.
        by_operator: The operators, the slowest first.
        unknown: Operators that the cost model has no kind for, counted by their bytes.
        replaced: Types that the device has no units for, whose products are timed at its rate of float32.
        communication_seconds: In which something is exchanged with other processes; None where there is one alone,
            and in older records.
        exposed_seconds: In which the device waits for that.
    """

    step_seconds: NonNegativeFloat
    forward_seconds: NonNegativeFloat
    backward_seconds: NonNegativeFloat
    optimizer_seconds: NonNegativeFloat
    host_seconds: NonNegativeFloat
    device_seconds: NonNegativeFloat
    flops: NonNegativeInt
    moved_bytes: NonNegativeInt
    by_operator: tuple[OperatorTime, ...] = ()
    unknown: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    communication_seconds: NonNegativeFloat | None = None
    exposed_seconds: NonNegativeFloat | None = None
