"""One HTML file without a network: tables that sort and filter, charts, and the settings and command of each row."""

from __future__ import annotations

from actbench.tools.html.html import html_lines, html_page

__all__ = ["html_lines", "html_page"]
