"""The command line: one file per group of verbs; each verb is a library call plus printing."""

from __future__ import annotations

import os
import sys

from actbench.cli import (  # noqa: F401  (each has verbs)
    convert,
    doctor,
    encodings,
    exits,
    kernels,
    listing,
    report,
    streams,
    sweep,
    tables,
    train,
)
from actbench.cli.app import app
from actbench.errors import ActbenchError, shortened


def main() -> None:
    """Run the command line.

    Exit status: 0 all is well, 1 some case failed or a limit was crossed, 2 wrong usage, 130 interrupted.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # what starts Python here imports nothing from the current folder
    with streams.tolerant() as out, exits.noticed():
        try:
            _run(debug="--debug" in sys.argv[1:2])
        finally:
            out.flush()
            if out.error is not None and not isinstance(out.error, BrokenPipeError):  # then nobody reads on
                print(f"actbench: standard output cannot be written: {out.error.strerror}", file=sys.stderr)
                sys.exit(2)


def _run(*, debug: bool) -> None:
    try:
        app(prog_name="actbench")
    except (ActbenchError, OSError) as error:
        if debug:
            raise
        print(f"actbench: {shortened(_said(error))}", file=sys.stderr)
        sys.exit(2)


def _said(error: ActbenchError | OSError) -> str:
    if isinstance(error, ActbenchError):
        return str(error)
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename is not None else "")
