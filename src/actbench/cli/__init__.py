"""The command line: one file per group of verbs; each verb is a library call plus printing."""

import sys

from actbench.interrupts import INTERRUPTED, raise_again


def main() -> None:
    """Run the command line.

    Exit status: 0 success, 1 some case failed or broke a limit, 2 wrong usage, 130 interrupted.
    """
    from actbench.cli.running import run  # which takes some tenths of a second

    raise_again()
    try:
        run()
    except KeyboardInterrupt:
        print("actbench: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
