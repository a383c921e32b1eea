"""The width of printed text: the terminal's, or a fixed width for a pipe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TextIO

from actbench.cli.app import LARGEST

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120


def console(file: TextIO | None = None) -> Console:
    """Return a console on a stream, by default standard output; COLUMNS sets its width, a pipe's default is 120."""
    from rich.console import Console

    found = Console(file=file, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and 0 < int(columns) < LARGEST:
        found.width, found.height = int(columns), found.height  # for a dumb terminal rich uses both sizes or neither
    elif not found.is_terminal:
        found.width = PIPE_WIDTH
    return found
