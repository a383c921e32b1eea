"""Progress in the cell of a notebook: a line that says what goes on, for as long as it does."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

from actbench.display import cell_line
from actbench.model.records import Case
from actbench.report.plain import plain
from actbench.run.progress import Progress
from actbench.run.progresslines import ProgressLines

_SILENCE_SECONDS: Final = 1.0


@contextmanager
def shown_in_cell() -> Iterator[Progress]:
    """Show the progress that is told inside the block in the cell that runs; outside of a notebook show nothing."""
    with cell_line() as tell:
        if tell is None:
            yield Progress()
            return
        lines = _CellLines(tell)
        with lines.ticking():
            yield lines


class _CellLines(ProgressLines):
    """The last of the lines of progress, which a second later says what goes on; messages are printed and stay."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(Console(file=io.StringIO()), silence_seconds=_SILENCE_SECONDS)
        self._line = tell

    def doing(self, text: str) -> None:
        """Show the text."""
        super().doing(text)
        self._tell(f"{text} …")

    def noted(self, case: Case, text: str) -> None:
        """Show the text."""
        self._note(case, text)

    def message(self, text: str) -> None:
        """Print the message below the cell, where it stays."""
        print(plain(text), file=sys.stderr)

    def _write(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._line(plain(text))
