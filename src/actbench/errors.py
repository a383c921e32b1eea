"""Every error that actbench raises on purpose, and the boundary around code that is not its own.

ActbenchError
├── UsageError            a flag, name or value that cannot be used
│   ├── ArgumentError     an argument of another type than the function takes
│   ├── SpecError         a specification of a scheme or an encoding that does not parse or does not validate
│   ├── RecipeError       a recipe that does not parse or does not validate
│   └── ModelError        a model that cannot be found, read or built
├── CodeError             code that is not actbench's own failed, such as a model's or a user's file
├── ConversionError       a model that a scheme cannot be applied to, or schemes that do not go together
│   ├── NothingToConvertError  a model that holds nothing a scheme works on
│   ├── IdleError         a scheme that changes nothing of what a training step keeps
│   └── UntraceableError  a model that fake tensors cannot run
├── StoreError            a results file that cannot be read or written
├── KernelError           a kernel that cannot be compiled or launched
└── MeasurementError      a case that cannot be measured here
    └── OutOfMemoryError       a step that does not fit in the memory it may use

A message says what was asked, what was found and what to do.
"""

from __future__ import annotations

import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_WORD = 400
"""Most characters that a message repeats of one word, such as a name that somebody else wrote."""

LONGEST_TEXT = 4000
"""Most characters of a message."""

_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "bad_alloc", "CUDA error: out of memory")
_PACKAGES = {"site-packages", "dist-packages"}  # of any environment: a venv may use the packages of another


class ActbenchError(Exception):
    """Base of every error that actbench raises on purpose; shown to the user without a traceback.

    Its message is :func:`shortened`: whatever it repeats may be of any length.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class UsageError(ActbenchError):
    """A flag, name or value that cannot be used."""


class ArgumentError(UsageError, TypeError):
    """An argument of another type than the function takes."""


class SpecError(UsageError):
    """A specification of a scheme or an encoding that does not parse or does not validate."""


class RecipeError(UsageError):
    """A recipe that does not parse or does not validate."""


class ModelError(UsageError):
    """A model that cannot be found, read or built."""


class CodeError(ActbenchError):
    """Code that is not actbench's own failed: a model, a loss, a batch, an optimizer or a scheme's file."""


class ConversionError(ActbenchError):
    """A model that a scheme cannot be applied to, or schemes that do not go together."""


class NothingToConvertError(ConversionError):
    """A model, or the part of it that a scheme is limited to, holds nothing that the scheme works on."""


class IdleError(ConversionError):
    """A scheme that runs in a training step and changes nothing of what the step keeps."""


class UntraceableError(ConversionError):
    """A model whose forward pass, or whose operators, need the values of tensors; fake tensors have none."""


SPARSE = (
    "sparse tensors are not simulated, since the number of their elements is not known; make them dense, such as "
    "nn.Embedding(sparse=False), or measure with --meter cpu or --meter cuda"
)
"""Why a sparse tensor without values is refused."""


class StoreError(ActbenchError):
    """A results file that cannot be read or written."""


class KernelError(ActbenchError):
    """A kernel that cannot be compiled or launched."""


class MeasurementError(ActbenchError):
    """A case that cannot be measured on this machine or by this meter."""


class OutOfMemoryError(MeasurementError):
    """A step that does not fit in the memory it may use.

    Args:
        message: How much memory was asked for and how much there was.
        phase: Part of the step in which memory ran out; None if unknown.
    """

    def __init__(self, message: str, phase: str | None = None) -> None:
        super().__init__(message)
        self.phase = phase


def check_argument(value: object, of: type | tuple[type, ...], what: str, wanted: str) -> None:
    """Raise an ArgumentError if a value is no ``of``; ``what`` takes ``wanted``, in the words of the message."""
    if not isinstance(value, of):
        written = f", {value!r:.60}" if isinstance(value, str | int | float) else ""  # others may have no end
        raise ArgumentError(f"{what} takes {wanted}, found {type(value).__name__}{written}")


def shortened(text: str) -> str:
    """Return a text short enough to show: a word or text that is too long keeps only its two ends."""
    return _ends(re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _ends(word[0], LONGEST_WORD), text), LONGEST_TEXT)


def message_of(error: BaseException) -> str:
    """Return class and message of any error, :func:`shortened`, even if its message cannot be read."""
    try:
        message = str(error).strip()
    except BaseException as other:  # its __str__ is somebody else's code, and may raise anything
        message = f"its message cannot be read ({type(other).__name__})"
    return shortened(encodable(f"{type(error).__name__}: {message}".removesuffix(": ")))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says something, or the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def encodable(text: str) -> str:
    """Return a text that can be written as UTF-8: lone surrogates become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out; torch has several such errors, and C++ has its own."""
    known = isinstance(error, MemoryError) or type(error).__name__ == OutOfMemoryError.__name__
    return known or any(words in message_of(error) for words in _NO_MEMORY)


def _ends(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…({len(text) - 2 * half:,} more)…{text[-half:]}"


@contextmanager
def boundary(doing: str, kind: type[ActbenchError] = CodeError) -> Iterator[None]:
    """Turn whatever the code in the block raises, even ``SystemExit``, into one error of actbench.

    Use it around models, losses, batches, optimizers and user files. Errors of actbench itself and Ctrl-C pass
    unchanged.

    Args:
        doing: Beginning of the message: what did not work.
        kind: The error to raise.

    Raises:
        OutOfMemoryError: There was not enough memory.
        ActbenchError: Anything else, as ``kind``.
    """
    try:
        with _without_tracebacks():
            yield
    except (ActbenchError, KeyboardInterrupt):
        raise
    except BaseException as error:
        message = f"{doing}: {message_of(error)}{place_of(error)}"
        raise (OutOfMemoryError if is_out_of_memory(error) else kind)(message) from error


def place_of(error: BaseException) -> str:
    """Return file and line of the user's own code where an error arose, in parentheses, or an empty text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def is_users(file: str) -> bool:
    """Return whether a file is the user's: neither Python's, nor of an installed package, nor ours."""
    path = Path(file)
    installed = (Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
    is_installed = not _PACKAGES.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in installed)
    return os.path.isfile(path) and not is_installed


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging its own traceback when fake tensors fail; the error itself says why."""

    def is_critical(record: logging.LogRecord) -> bool:  # one of each block: an inner one takes only its own away
        return record.levelno >= logging.CRITICAL

    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(is_critical)  # a level of its own would empty the caches of all loggers, thousands with transformers
    try:
        yield
    finally:
        log.removeFilter(is_critical)
