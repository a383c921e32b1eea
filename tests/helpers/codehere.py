"""Runs code in the process that is asked, such as one of ``actbench.run.tasks.Tasks``; what it forks tells too."""

from __future__ import annotations

import os
import sys
import tempfile


def run(code: str) -> str:
    """Run code, and return what it and its children wrote on standard output."""
    with tempfile.TemporaryFile("w+") as told:
        os.dup2(told.fileno(), 1)
        exec(code, {"__name__": "__main__"})
        sys.stdout.flush()
        told.seek(0)
        return told.read()
