"""The page as pieces of HTML: charts, and tables whose cells are text; numbers also have their full value, to sort by.

A browser runs only our scripts, whose hashes the page names.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import importlib.resources
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jinja2

from actbench.model.records import Failure, Record
from actbench.report.plain import plain
from actbench.report.render.formats import cells, readable, unbroken
from actbench.report.tables import Table
from actbench.tools.html.charts import Picture
from actbench.units import counted

Row = TypeVar("Row")


class Group(NamedTuple):
    """The charts of rows that can be compared, under a name for the reader to choose."""

    name: str
    pictures: tuple[Picture, ...]
    remarks: tuple[str, ...] = ()


class Details(NamedTuple):
    """What the page shows when a reader opens a row of its first table, by heading."""

    texts: Mapping[str, str]
    is_estimated: bool = False


class Beside(NamedTuple):
    """What a page shows beside the tables: charts, and details of the rows of the first table, in their order."""

    groups: tuple[Group, ...] = ()
    details: tuple[Details, ...] = ()
    remark: str = ""


MOST_DETAILED = 5000
"""Most rows with settings and commands; a larger table has none, so that the file stays small."""
MOST_GROUPS = 40
"""Most groups with charts on a page: a file of a few MB opens at once."""


def beside(groups: Iterable[Group], rows: Sequence[Row], details: Callable[[Row], Details]) -> Beside:
    """Return what a page shows beside a table of rows."""
    if len(rows) <= MOST_DETAILED:
        return Beside(shown(groups), tuple(map(details, rows)))
    remark = f"Rows of tables with more than {MOST_DETAILED:,} have no settings to open here."
    return Beside(shown(groups), remark=remark)


def shown(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the groups for a page, which opens with the first that was asked for; no others are held meanwhile.

    Of more groups than a page takes, those with the fewest charts are left out.
    """
    places = itertools.count()
    numbered = zip((group for group in groups if group.pictures), places, strict=False)
    ranked = heapq.nlargest(MOST_GROUPS, numbered, key=lambda each: len(each[0].pictures))
    left_out = next(places) - len(ranked)
    drawn = [group for group, _ in sorted(ranked, key=lambda each: each[1])]
    more = (f"{left_out} more groups of rows have no charts here: make a report of fewer records.",) * bool(left_out)
    return tuple(group._replace(remarks=(*group.remarks, *more)) for group in drawn)


def texts_of(record: Record[Any, Any]) -> dict[str, str]:
    """Return the settings, command and machine of a record, by heading."""
    machine, versions, outcome = record.machine, record.versions, record.outcome
    device = f"{machine.gpu}, " if machine.gpu else ""
    commit = f" ({versions.commit[:12]}{', uncommitted changes' if versions.dirty else ''})" if versions.commit else ""
    numbers = versions.model_dump(exclude_none=True, exclude={"actbench", "commit", "dirty"})
    settings = {
        name.replace("_", " "): value
        for name, value in record.case.model_dump(exclude_none=True).items()
        if value is not False
    }
    found = {
        "Command": record.command,
        "Settings": ", ".join(name if value is True else f"{name} {value}" for name, value in settings.items()),
        "Failure": f"{outcome.reason}: {outcome.message}" if isinstance(outcome, Failure) else "",
        "Warnings": "\n".join(getattr(outcome, "warnings", ())),
        "Machine": f"{machine.name}: {device}{machine.processor}, {counted(machine.cores, 'core')}, {machine.system}",
        "Versions": f"actbench {versions.actbench}{commit}, {', '.join(f'{k} {v}' for k, v in numbers.items())}",
        "Recorded": f"{record.recorded_at}, recipe {record.recipe}",
    }
    return {heading: plain(text) for heading, text in found.items() if text}


def html_lines(
    tables: Sequence[Table], title: str, beside: Beside | None = None, graphs: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield the pieces of a page that needs no other file and no network; without scripts it can still be read.

    Args:
        tables: Below each other.
        title: The heading; a table of the same title has none of its own.
        beside: Charts, and details of the first table's rows.
        graphs: What the script of flame graphs draws; None for a page without.
    """
    beside = beside or Beside()
    texts: dict[str, int] = {}  # each once, with its index
    rows = [
        {heading: texts.setdefault(text, len(texts)) for heading, text in each.texts.items()} for each in beside.details
    ]
    scripts = list(map(resource, ("page.js", *(["flamegraph.js"] if graphs else []))))
    # a browser runs these scripts and no others, and loads nothing
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return _PAGE.generate(
        title=plain(title),
        allowed=" ".join(f"'sha256-{each}'" for each in hashes),
        style=resource("page.css") + (resource("flamegraph.css") if graphs else ""),
        lead=readable(tables[0]).lead if tables and tables[0].title == title else (),
        frame=resource("flamegraph.html") if graphs else "",
        beside=beside,
        sections=(_section(table, beside.details if table is tables[0] else ()) for table in tables),
        data={"texts": list(texts), "rows": rows, **(graphs or {})},
        scripts=scripts,
    )


def html_page(tables: Sequence[Table], title: str, beside: Beside | None = None) -> str:
    """Return a page; see :func:`html_lines`."""
    return "".join(html_lines(tables, title, beside))


def resource(name: str) -> str:
    """Return the text of a file beside this one."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


_ENVIRONMENT = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
_PAGE = _ENVIRONMENT.from_string(resource("page.html") + "\n")

_LONGEST_LINE = 26  # most characters of a cell that is not wrapped
SHOWN_DETAIL = 1
"""Columns of more detail are shown only when a reader asks for all."""


def _section(table: Table, details: Sequence[Details]) -> dict[str, Any]:
    """Return what the page shows of a table; ``details`` belong to its rows, and may be empty."""
    table = readable(table)
    text = cells(table)
    classes, values = [], []
    for column, is_number in zip(text.columns, text.numeric, strict=True):
        is_long = not is_number and max(map(len, text.frame[column.key]), default=0) > _LONGEST_LINE
        names = {"number": is_number, "long": is_long, "more": column.detail > SHOWN_DETAIL}
        classes.append(" ".join(name for name, has in names.items() if has))
        values.append(table.frame[column.key] if is_number else itertools.repeat(None))
    rows = (
        zip(classes, row, raw, strict=True) for row, raw in zip(text.rows, zip(*values, strict=False), strict=False)
    )
    return {
        "table": table,
        "code": [(plain(title), code) for title, code in table.code],
        "headings": list(zip(classes, map(unbroken, text.headings), strict=True)),
        "has_details": bool(details),
        "rows": zip(rows, details or itertools.repeat(None), strict=False),
    }
