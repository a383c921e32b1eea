"""Tables as text: Markdown, CSV and HTML; on a terminal (``screen``); and to files (``exports``)."""

from __future__ import annotations

from actbench.results.render.formats import csv_text, json_text, markdown
from actbench.results.render.page import html_page

__all__ = ["csv_text", "html_page", "json_text", "markdown"]
