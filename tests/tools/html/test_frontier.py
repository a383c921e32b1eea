"""The page of tables that have curves: their rows as points, the answer above, and code to paste."""

from __future__ import annotations

import re
from typing import Any

import pandas
import pytest

from actbench.report.exporting import Exported
from actbench.report.tables import Curve, Table
from actbench.report.tables.values import Column
from actbench.tools.html.charts import Picture
from actbench.tools.html.export import HTML
from actbench.tools.html.pictures import Row, curves_of_tables, error_beside_memory, memory_against_time
from actbench.units import GIB

COLUMNS: tuple[Column[Any], ...] = (
    Column("plan", "Plan", "text", str),
    Column("need", "Need", "bytes", int),
    Column("took", "Step", "seconds", float),
)


def table(name: str, *rows: tuple[str, int, float], limit: int | None = 4 * GIB) -> Table:
    curve = Curve(f"{name} gradients", "model on card", "plan", "took", "need", limit)
    filled = [dict(zip(("plan", "need", "took"), row, strict=True)) for row in rows]
    return Table(
        f"Frontier, {name}",
        COLUMNS,
        pandas.DataFrame(filled, dtype=object),
        lead=(f"{name} <b>first</b>",),
        curve=curve,
    )


EXACT = table("exact", ("exact", 8 * GIB, 1.0), ("checkpoint blocks 0-3", 4 * GIB, 1.3))
OTHER = table("any", ("gact", 3 * GIB, 1.2))


def points(picture: Picture) -> dict[str, tuple[float, float]]:
    """Return the pixels of each point, by its title."""
    found = {}
    for each in picture.chart.svg.findall("path[title]"):
        place = re.findall(r"translate\(([\d.]+),([\d.]+)\)", each.get("transform") or "")
        found[each.findtext("title") or ""] = (float(place[0][0]), float(place[0][1]))
    return found


def texts(picture: Picture) -> list[str]:
    return [each.text or "" for each in picture.chart.svg.findall("text")]


def test_tables_of_one_chart_are_drawn_together_with_the_limit() -> None:
    ((name, picture),) = curves_of_tables([EXACT, OTHER, Table("t", COLUMNS, pandas.DataFrame())]).items()

    assert name == "model on card"
    drawn = {
        "gact\nneeds 3.00 GiB\nstep 1.2 s\nwith any gradients": picture.chart.at(1.2, 3 * GIB),
        "exact\nneeds 8.00 GiB\nstep 1 s\nwith exact gradients": picture.chart.at(1.0, 8 * GIB),
        "checkpoint blocks 0-3\nneeds 4.00 GiB\nstep 1.3 s\nwith exact gradients": picture.chart.at(1.3, 4 * GIB),
    }
    found = points(picture)
    assert list(found) == list(drawn), "what is drawn last is above the others"
    assert all(found[title] == pytest.approx(place, abs=0.1) for title, place in drawn.items())
    assert {"any gradients", "exact gradients", "limit 4.00 GiB"} <= set(texts(picture))


def test_without_a_limit_there_is_no_line() -> None:
    (picture,) = curves_of_tables([table("exact", ("a", 1, 1.0), limit=None)]).values()

    assert not any(text.startswith("limit") for text in texts(picture))


def test_a_page_has_the_answer_first_and_the_code_as_text() -> None:
    first = Table("What fits", COLUMNS, EXACT.frame, lead=("checkpoint <i>fits</i>",), code=(("a loop", "x < y\n"),))

    page = "".join(HTML.text(Exported([first, EXACT], "What fits", [], lambda text: None)))

    visible = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    assert visible.index("checkpoint &lt;i&gt;fits") < visible.index("<table")
    assert visible.count('class="lead"') == 2
    assert "<summary>a loop</summary><pre>x &lt; y" in visible
    assert visible.index("checkpoint &lt;i&gt;fits") < visible.index("<svg") < visible.index("<table")


def row(name: str, peak: float, *, is_best: bool = True) -> Row:
    return Row(name, name, "cpu", round(peak * GIB), None, False, is_best, None, None, {})


def test_names_that_would_overlap_are_left_out_of_a_chart() -> None:
    rows = [("checkpoint", 9, 0.0), ("randomized:0.2", 1, 1.0), ("fewbit:3+other", 1, 0.9)]
    picture = error_beside_memory([(row(name, peak), error) for name, peak, error in rows])

    assert "fewbit:3+other" not in texts(picture)
    assert {"checkpoint", "randomized:0.2"} <= set(texts(picture))
    assert set(points(picture)) == {name for name, _, _ in rows}, "the pointer names it"


def test_names_of_the_frontier_come_first() -> None:
    rows = [row("beaten", 2.01, is_best=False), row("best", 2), row("exact", 9, is_best=False)]
    picture = memory_against_time([(each, 1.0) for each in rows], None)

    assert [name for name in ("beaten", "best", "exact") if name in texts(picture)] == ["best", "exact"]


def test_the_limit_is_a_line_only_where_a_row_is_above_it() -> None:
    over, below = (memory_against_time([(row("a", 5), 1.0), (row("b", 3), 2.0)], limit * GIB) for limit in (4, 6))

    assert "limit 4.00 GiB" in texts(over)
    assert not any(text.startswith("limit") for text in texts(below))


def test_the_name_of_the_limit_is_away_from_the_end_of_the_curve() -> None:
    (picture,) = curves_of_tables([EXACT]).values()

    [name] = [each for each in picture.chart.svg.findall("text") if each.text == "limit 4.00 GiB"]
    assert float(name.get("x") or 0) < picture.chart.at(1.0, 0)[0] + 5
