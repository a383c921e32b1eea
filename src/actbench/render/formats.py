"""A table as Markdown, CSV and HTML, and records as JSON. Formats lay out cells and know nothing of memory."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterable, Sequence

from pydantic import TypeAdapter

from actbench.plain import csv_cell, plain
from actbench.plain import markdown as marked
from actbench.records import Record
from actbench.render.cells import cells, spoken
from actbench.tables import Table


def markdown(table: Table) -> str:
    """Return a section of Markdown: the title, the table and its notes as a list."""
    table, text = spoken(table), cells(table)
    lines = [f"## {marked(table.title)}", ""]
    if text.headings:
        lines += [
            _markdown_row(map(marked, text.headings)),
            _markdown_row("---:" if numeric else "---" for numeric in text.numeric),
            *(_markdown_row(map(marked, row)) for row in text.rows),
            "",
        ]
    lines += [f"- {marked(note)}" for note in table.notes]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_row(row: Iterable[str]) -> str:
    return "| " + " | ".join(row) + " |"


def csv_text(table: Table) -> str:
    """Return comma-separated values: column keys as the heading, raw values in bytes and seconds, empty for unknown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    for row in table.rows:
        writer.writerow([csv_cell(value) if isinstance(value, str) else value for value in row.values()])
    return out.getvalue()


def json_text(records: Sequence[Record]) -> str:
    """Return the records as a JSON list, each as it stands in a results file."""
    return TypeAdapter(list[Record]).dump_json(list(records), indent=2).decode() + "\n"


def html_page(tables: Sequence[Table], title: str) -> str:
    """Return a page that stands alone: no script, no other file."""
    sections = "\n".join(_html_section(table) for table in tables)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(plain(title))}</title>\n'
        f"<style>{_STYLE}</style>\n{sections}\n</html>\n"
    )


def _html_section(table: Table) -> str:
    table, text = spoken(table), cells(table)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in text.headings)
    body = "\n".join(f"<tr>{_html_cells(row, text.numeric)}</tr>" for row in text.rows)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return (
        f"<h2>{html.escape(table.title)}</h2>\n<table>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>" + (f"\n<ul>{notes}</ul>" if notes else "")
    )


def _html_cells(row: Sequence[str], numeric: Sequence[bool]) -> str:
    marks = ((cell, ' class="number"' if is_number else "") for cell, is_number in zip(row, numeric, strict=True))
    return "".join(f"<td{mark}>{html.escape(cell)}</td>" for cell, mark in marks)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#222;background:#fff}"
    "table{border-collapse:collapse}th,td{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #ddd}"
    ".number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}li{color:#666}"
)
