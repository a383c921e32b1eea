"""The command line: one file per group of verbs; each verb is a library call plus printing."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import platformdirs

from actbench.cli import (  # noqa: F401  (each has verbs)
    convert,
    doctor,
    encodings,
    fit,
    kernels,
    listing,
    report,
    sweep,
    together,
    train,
)
from actbench.cli.printing import explained_exits, tolerant
from actbench.errors import ActbenchError, shortened
from actbench.results.plain import plain


def main() -> None:
    """Run the command line.

    Exit status: 0 success, 1 some case failed or broke a limit, 2 wrong usage, 130 interrupted.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes import nothing from the current folder
    _give_compilers_a_cache()
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao warns, which transformers imports
    with tolerant() as out, explained_exits():
        try:
            _run(debug="--debug" in sys.argv[1:2])
        finally:
            out.flush()
            if out.error is not None and not isinstance(out.error, BrokenPipeError):  # else nobody reads on
                print(f"actbench: standard output cannot be written: {out.error.strerror}", file=sys.stderr)
                sys.exit(2)


def _give_compilers_a_cache() -> None:
    """Let torch store compiled code in the user's cache, if that can be written.

    By default torch makes a temporary folder when it is imported.
    """
    folder = platformdirs.user_cache_path("actbench") / "inductor"
    if not folder.is_absolute():
        return
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    if os.access(there, os.W_OK | os.X_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _run(*, debug: bool) -> None:
    try:
        with _debugging() if debug else nullcontext():
            together.run(sys.argv[1:])
    except (ActbenchError, OSError) as error:
        if debug:
            raise
        print(plain(f"actbench: {shortened(_said(error))}"), file=sys.stderr)
        sys.exit(2)


@contextmanager
def _debugging() -> Iterator[None]:
    """Print debug messages: the tracebacks of failed cases and runs."""
    log, handler = logging.getLogger("actbench"), logging.StreamHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _said(error: ActbenchError | OSError) -> str:
    if isinstance(error, ActbenchError):
        return str(error)
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename is not None else "")
