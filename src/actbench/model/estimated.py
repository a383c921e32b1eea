"""The estimated time of a simulated step. Amounts are in base units: bytes and seconds."""

from __future__ import annotations

from actbench.model.data import Data, StoredData
from actbench.units import NonNegativeFloat, NonNegativeInt

OTHERS = "(others)"
"""Name of the sum of all operators of a step that are not named."""


class OperatorTime(StoredData):
    """The estimated time of the calls of one operator in a step.

    Attributes:
        name: Name of the operator; in parentheses what is none: waits of the device, or the sum of all unnamed
            ones.
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
        sent_bytes: Bytes sent in a ring of n processes: (n - 1)/n of a tensor that is gathered or scattered, twice that
            of one that is added up.
    """

    kind: str
    calls: NonNegativeInt
    sent_bytes: NonNegativeInt


class EstimatedTime(StoredData):
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
        communication_seconds: Time in which data are exchanged with other processes; None for a single process, and in
            older records.
        exposed_seconds: Time in which the device waits for this exchange.
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
