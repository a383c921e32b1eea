"""``--export-latex``: tables for papers, as LaTeX with the lines of the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from actbench.report.exporting import Exported, ExportFormat
from actbench.report.plain import plain
from actbench.report.tables import Table

_MARKS: Final = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{mark: rf"\{mark}" for mark in "&%$#_{}"},
    "–": "--",
    "±": r"$\pm$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "×": r"$\times$",
    "µ": r"\textmu{}",
    "…": r"\dots{}",
}
_MARK: Final = re.compile("|".join(map(re.escape, _MARKS)))


def _escaped(text: str) -> str:
    """Return a text as one line of LaTeX that shows it, whatever marks it has."""
    return _MARK.sub(lambda found: _MARKS[found[0]], " ".join(plain(text).split()))


def _text(what: Exported) -> Iterator[str]:
    yield "% needs \\usepackage{booktabs}, and \\usepackage{textcomp} in old distributions\n"
    for table in what.tables:
        yield from _lines(table)


def _lines(table: Table) -> Iterator[str]:
    """Yield a table that floats; its title is the caption, and what is said of it stands below the rows."""
    from actbench.report.render.formats import cells, readable

    table, text = readable(table), cells(table)
    yield "\n\\begin{table}\n\\centering\n"
    yield f"\\caption{{{_escaped(table.title)}}}\n"
    if text.headings:
        yield f"\\begin{{tabular}}{{@{{}}{''.join('r' if numeric else 'l' for numeric in text.numeric)}@{{}}}}\n"
        yield f"\\toprule\n{_row(text.headings)}\\midrule\n"
        yield from map(_row, text.rows)
        yield "\\bottomrule\n\\end{tabular}\n"
    for line in (*table.lead, *table.notes):
        yield f"\n\\par\\footnotesize {_escaped(line)}\n"
    yield "\\end{table}\n"


def _row(cells_of_row: Iterable[str]) -> str:
    return " & ".join(map(_escaped, cells_of_row)) + " \\\\\n"


LATEX: Final = ExportFormat("Write the tables as LaTeX, for the package booktabs.", _text)
