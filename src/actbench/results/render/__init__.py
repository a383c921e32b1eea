"""Tables as text: Markdown, CSV and HTML; on a terminal (``screen``); and to files (``exports``)."""

from __future__ import annotations

from actbench.results.render.formats import csv_text, html_page, json_text, markdown

__all__ = ["csv_text", "html_page", "json_text", "markdown"]
