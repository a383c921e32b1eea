"""The boundary around code that is not actbench's own: that of models, losses, batches, optimizers and user files."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actbench.errors import ActbenchError, CodeError, OutOfMemoryError, is_out_of_memory, told

_PACKAGES = {"site-packages", "dist-packages"}  # of whichever environment: one may stand on another


@contextmanager
def boundary(doing: str, kind: type[ActbenchError] = CodeError) -> Iterator[None]:
    """Make one error of actbench's of whatever the code in the block raises, ``SystemExit`` and its like included.

    Errors of actbench's own pass, and so does Ctrl-C.

    Args:
        doing: What did not work, as the message begins.
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
        message = f"{doing}: {told(error)}{place_of(error)}"
        raise (OutOfMemoryError if is_out_of_memory(error) else kind)(message) from error


def place_of(error: BaseException) -> str:
    """Return where in the user's own code an error arose, in parentheses, or nothing."""
    installed = (Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_installed = not _PACKAGES.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in installed)
        if os.path.isfile(path) and not is_installed:
            return f" ({path}:{frame.lineno})"
    return ""


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging a traceback of its own for what fails on fake tensors; the error itself says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
