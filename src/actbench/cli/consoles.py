"""How wide what people read is: as the terminal, or as a pipe is said to be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TextIO

from actbench.cli.app import LARGEST

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120


def console(file: TextIO | None = None) -> Console:
    """Return a console on a stream, or else standard output; what is no terminal has COLUMNS characters, or 120."""
    from rich.console import Console

    found = Console(file=file, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and 0 < int(columns) < LARGEST:
        found.width, found.height = int(columns), found.height  # rich takes a dumb terminal's from both or none
    elif not found.is_terminal:
        found.width = PIPE_WIDTH
    return found
