"""How objects of the Python API are shown in a notebook, and the line of progress of a cell that runs."""

from __future__ import annotations

import builtins
import html
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Displayed:
    """An object that a notebook shows as HTML.

    Who draws it knows the tables of reports, which none of these objects does: it is looked up when it is asked for.
    """

    def _repr_html_(self) -> str:
        """Return a fragment of HTML; Jupyter asks for it by this name."""
        html: str = importlib.import_module("actbench.report.render.notebook").fragment(self)
        return html


@contextmanager
def cell_line() -> Iterator[Callable[[str], None] | None]:
    """Show a line of text in the cell that runs, and none once the block has ended; outside of a notebook yield None.

    What is yielded takes the line in place of the one before, and may be called in any thread.
    """
    if not _is_notebook():
        yield None
        return
    shown = importlib.import_module("IPython.display")
    handle: Any = shown.display(shown.HTML(""), display_id=True)
    lock = threading.Lock()

    def tell(text: str) -> None:
        with lock:
            handle.update(shown.HTML(f'<div style="opacity: 0.7">{html.escape(text)}</div>' if text else ""))

    try:
        yield tell
    finally:
        tell("")


def _is_notebook() -> bool:
    """Return whether a kernel runs this process, whose cells show HTML; IPython in a terminal is none."""
    asked = getattr(builtins, "get_ipython", None)
    return asked is not None and hasattr(asked(), "kernel")
