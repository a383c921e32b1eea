"""Tables as text: Markdown and CSV; on a terminal (``screen``); and to files (``exports``)."""

from __future__ import annotations

from actbench.report.render.formats import csv_text, json_text, markdown

__all__ = ["csv_text", "json_text", "markdown"]
