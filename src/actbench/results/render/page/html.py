"""The page as lines of HTML. A browser runs only our scripts and the chart library, whose hashes the page names."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Iterator, Sequence
from typing import Any

from actbench.results.plain import plain
from actbench.results.render.page import library
from actbench.results.render.page.pictures import Beside, Details, Group, shown
from actbench.results.render.page.sections import section
from actbench.results.tables import Table

MOST_DETAILED = 5000
"""Most rows with settings and commands; a larger table has none, so that the file stays small."""


def html_page(tables: Sequence[Table], title: str, beside: Beside | None = None) -> str:
    """Return a page; see :func:`html_lines`."""
    return "".join(html_lines(tables, title, beside))


def html_lines(tables: Sequence[Table], title: str, beside: Beside | None = None) -> Iterator[str]:
    """Yield the lines of a page that needs no other file and no network.

    If the library that draws charts is not installed, the page has none and says so. Without scripts the tables can
    still be read.
    """
    beside = beside or Beside()
    details = beside.details if len(beside.details) <= MOST_DETAILED else ()
    groups = shown(beside.groups) if library.is_installed() else ()
    scripts = [_resource("page.js"), *([library.script(), _resource("charts.js")] if groups else [])]
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
    yield f"<title>{html.escape(plain(title))}</title>\n<style>{_resource('page.css')}</style>\n</head>\n<body>\n"
    yield f"<h1>{html.escape(plain(title))}</h1>\n"
    if groups:
        yield _CHARTS
    elif beside.has_charts:
        yield f"<p class=missing>This page has no charts: the library that draws them is missing. {_INSTALL}</p>\n"
    if len(details) < len(beside.details):
        yield f"<p class=missing>Rows of tables with more than {MOST_DETAILED:,} have no settings to open here.</p>\n"
    for place, table in enumerate(tables):
        yield from section(table, details if place == 0 else (), heading=table.title != title)
    yield f'<script type="application/json" id="data">{_json(_data(groups, details))}</script>\n'
    yield from (f"<script>{script}</script>\n" for script in scripts)
    yield "</body>\n</html>\n"


_INSTALL = f"Install it: <code>{html.escape(library.EXTRA)}</code>"
_CHARTS = (
    '<section id="charts"><div class="tools"><label>Charts of <select id="group"></select></label></div>'
    '<div class="grid"></div><ul class="remarks"></ul></section>\n'
)


def _data(groups: Sequence[Group], details: Sequence[Details]) -> dict[str, Any]:
    """Return the data for the scripts: charts, each text of the details once, and the indices of each row's texts."""
    texts: dict[str, int] = {}
    rows = [{heading: texts.setdefault(text, len(texts)) for heading, text in each.texts.items()} for each in details]
    drawn = [
        {
            "name": group.name,
            "remarks": group.remarks,
            "pictures": [
                {"title": picture.title, "about": picture.about, "wide": picture.is_wide, "spec": picture.spec}
                for picture in group.pictures
            ],
        }
        for group in groups
    ]
    return {"texts": list(texts), "rows": rows, "groups": drawn}


_ESCAPED = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def _json(value: Any) -> str:
    """Write JSON that cannot end the script or be markup, whatever names it holds."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)


def _policy(scripts: Sequence[str]) -> str:
    """Return the policy that lets a browser run these scripts and no others, and load nothing."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"


def _resource(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()
