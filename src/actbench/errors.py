"""Every error actbench raises on purpose.

ActbenchError
├── UsageError            a flag, name or value that cannot be used
│   ├── SpecError         a specification of a scheme or an encoding that does not parse or does not validate
│   ├── RecipeError       a recipe that does not parse or does not validate
│   └── ModelError        a model that cannot be found, read or built
├── ConversionError       a model that a scheme cannot be applied to
│   ├── IdleError         a scheme that changes nothing of what a training step keeps
│   └── UntraceableError  a model that fake tensors cannot run
├── StoreError            a results file that cannot be read or written
├── KernelError           a kernel that cannot be compiled or launched
└── MeasurementError      a case that cannot be measured here
    └── OutOfMemoryError       a step that does not fit in the memory it may use

A message says what was asked, what was found and what to do.
"""

from __future__ import annotations


class ActbenchError(Exception):
    """Base of every error that actbench raises on purpose; shown to the user without a traceback."""


class UsageError(ActbenchError):
    """A flag, name or value that cannot be used."""


class SpecError(UsageError):
    """A specification of a scheme or an encoding that does not parse or does not validate."""


class RecipeError(UsageError):
    """A recipe that does not parse or does not validate."""


class ModelError(UsageError):
    """A model that cannot be found, read or built."""


class ConversionError(ActbenchError):
    """A model that a scheme cannot be applied to."""


class IdleError(ConversionError):
    """A scheme that runs in a training step and changes nothing of what the step keeps."""


class UntraceableError(ConversionError):
    """A model whose forward pass looks at values, or whose operators do not say what they keep without them."""


class StoreError(ActbenchError):
    """A results file that cannot be read or written."""


class KernelError(ActbenchError):
    """A kernel that cannot be compiled or launched."""


class MeasurementError(ActbenchError):
    """A case that cannot be measured on this machine or by this meter."""


class OutOfMemoryError(MeasurementError):
    """A step that does not fit in the memory it may use.

    Args:
        message: What was asked for and what was there.
        peak_bytes: The peak that would have been needed, where the meter knows it.
    """

    def __init__(self, message: str, peak_bytes: int | None = None) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes
