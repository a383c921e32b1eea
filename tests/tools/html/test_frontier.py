"""The page of tables that have curves: their rows as points, the answer above, and code to paste."""

from __future__ import annotations

import json
import re
from typing import Any

import pandas
import pytest

from actbench.report.exporting import Exported
from actbench.report.tables import Curve, Table
from actbench.report.tables.values import Column
from actbench.tools.html import library
from actbench.tools.html.charts import Picture, Scale, curves_of_tables, error_beside_memory, memory_against_time
from actbench.tools.html.export import HTML
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


def test_tables_of_one_chart_are_drawn_together_with_the_limit() -> None:
    ((name, picture),) = curves_of_tables([EXACT, OTHER, Table("t", COLUMNS, pandas.DataFrame())]).items()

    values = picture.spec["data"]["values"]
    assert name == "model on card"
    assert [(row["kind"], row["scheme"], row["drawn"], row["drawn_time"]) for row in values] == [
        ("any gradients", "gact", 3.0, 1.2),
        ("exact gradients", "exact", 8.0, 1.0),
        ("exact gradients", "checkpoint blocks 0-3", 4.0, 1.3),
    ]
    assert "limit 4.00 GiB" in json.dumps(picture.spec["layer"])


def test_without_a_limit_there_is_no_line() -> None:
    (picture,) = curves_of_tables([table("exact", ("a", 1, 1.0), limit=None)]).values()

    assert "limit" not in json.dumps(picture.spec["layer"])


def test_a_page_has_the_answer_first_and_the_code_as_text() -> None:
    first = Table("What fits", COLUMNS, EXACT.frame, lead=("checkpoint <i>fits</i>",), code=(("a loop", "x < y\n"),))

    page = "".join(HTML.text(Exported([first, EXACT], "What fits", [], lambda text: None)))

    visible = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    assert visible.index("checkpoint &lt;i&gt;fits") < visible.index("<table")
    assert visible.count('class="lead"') == 2
    assert "<summary>a loop</summary><pre>x &lt; y" in visible
    assert ('id="charts"' in visible) == library.is_installed()


@pytest.mark.skipif(not library.is_installed(), reason="vl-convert is not installed")
def test_the_chart_can_be_drawn() -> None:
    pictures = list(curves_of_tables([EXACT, OTHER]).values())

    assert library.image(pictures, "png").startswith(b"\x89PNG")


def shown_names(picture: Picture, width: int) -> list[str]:
    """Return the names that a chart of this width writes beside its points."""
    return [row["scheme"] for row in picture.spec["data"]["values"] if width >= row["room"]]


def test_names_that_would_overlap_are_left_out_of_a_narrow_chart_alone() -> None:
    rows = [
        {"scheme": scheme, "peak_bytes": peak * GIB, "gradient_error": error}
        for scheme, peak, error in (("checkpoint", 9, 0.0), ("randomized:0.2", 1, 1.0), ("fewbit:3+other", 1, 0.5))
    ]
    picture = error_beside_memory(rows, Scale("GiB", GIB))

    assert shown_names(picture, 800) == ["checkpoint", "randomized:0.2", "fewbit:3+other"]
    assert shown_names(picture, 250) == ["checkpoint", "randomized:0.2"]


def test_names_of_the_frontier_come_first() -> None:
    rows = [
        {"scheme": scheme, "peak_bytes": peak * GIB, "seconds": 1.0, "frontier": best, "source": "measured"}
        for scheme, peak, best in (("beaten", 2.01, False), ("best", 2, True), ("exact", 9, False))
    ]
    picture = memory_against_time([{**row, "fits": True, "meter": "cpu"} for row in rows], Scale("GiB", GIB), None)

    assert shown_names(picture, 800) == ["best", "exact"]


def test_the_name_of_the_limit_is_away_from_the_end_of_the_curve() -> None:
    (picture,) = curves_of_tables([EXACT]).values()

    [name] = [each["mark"] for each in picture.spec["layer"] if each["mark"].get("text") == "limit 4.00 GiB"]
    assert (name["x"], name["align"]) == (4, "left")
