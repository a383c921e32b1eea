"""What the record of a case says of an error that ended it."""

from __future__ import annotations

from actbench.errors import (
    ActbenchError,
    ConversionError,
    IdleError,
    MeasurementError,
    NothingToConvertError,
    UntraceableError,
    UsageError,
    is_out_of_memory,
    place_of,
    shortened,
)
from actbench.model.records import Failure, FailureReason

_REASONS: tuple[tuple[type[BaseException], FailureReason], ...] = (
    (NothingToConvertError, "nothing-converted"),
    (IdleError, "nothing-converted"),
    (ConversionError, "unsupported"),
    (MeasurementError, "unavailable"),
    (UsageError, "unsupported"),
)


def failure_of(error: BaseException) -> Failure:
    """Return the record of an error, with the part of the step in which memory ran out where it is known."""
    reasons = [reason for kind, reason in _REASONS if isinstance(error, kind)]
    reason: FailureReason = "out-of-memory" if is_out_of_memory(error) else (*reasons, "crash")[0]
    message = shortened(str(error)) if isinstance(error, ActbenchError) else f"{message_of(error)}{place_of(error)}"
    if isinstance(error, UntraceableError) and error.__cause__ is not None and ".py:" not in message:
        message += place_of(error.__cause__)
    return Failure(reason=reason, message=message, phase=getattr(error, "phase", None))
