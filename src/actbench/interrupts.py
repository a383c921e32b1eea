"""Ctrl-C while the command imports what it needs: it ends at once, with status 130 and no traceback.

An import that an exception ends has no good end, and nothing has begun that would have to be cleaned up. This file is
imported before all others and imports next to nothing itself.
"""

import os
import signal
import sys

INTERRUPTED = 130
"""Exit status of a command that the user interrupted."""


def leave_at_once() -> None:
    """Let Ctrl-C end this process, unless its parent process ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Let Ctrl-C raise a KeyboardInterrupt again, for code that has something to clean up."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_command() -> bool:
    """Return whether this process is the command, and not a program that imports actbench."""
    words = sys.orig_argv[1:]
    module = words[words.index("-m") + 1 :] if "-m" in words else []
    return module[:1] == ["actbench"] or os.path.basename(words[0] if words else "") == "actbench"


def _leave(*_: object) -> None:
    os.write(2, b"actbench: interrupted\n")
    os._exit(INTERRUPTED)


if is_command():
    leave_at_once()
