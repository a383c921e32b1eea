from __future__ import annotations

import io
import math
import sys

import pytest
from rich.console import Console

from actbench.errors import UsageError
from actbench.results.render import charts
from actbench.results.render.charts import Chart, Curve, drawn

CHART = Chart(
    "a title",
    "steps",
    "loss",
    (Curve("exact", ((0, 1.0), (10, 0.0)), (0.1, 0.1)), Curve("other", ((0, math.nan), (10, 0.5)))),
)


def text_of(chart: Chart) -> list[str]:
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(drawn(chart, 60, 6))
    return console.export_text().splitlines()


def test_a_falling_curve_goes_from_the_top_left_to_the_bottom_right() -> None:
    title, *rows, ends, legend = text_of(CHART)
    picture = [row.partition("│")[2] for row in rows]

    assert title == "a title"
    assert len(picture) == 6
    assert picture[0][0] != "\u2800"
    assert picture[0][-1] == "\u2800"
    assert picture[-1].rstrip("\u2800 ") != ""
    assert picture[-1][0] == "\u2800"
    assert "0 … 10 steps" in ends
    assert "exact" in legend
    assert "other" in legend


def test_what_is_no_number_is_left_out_and_a_flat_curve_is_drawn() -> None:
    assert "no finite value" in text_of(Chart("t", "x", "y", (Curve("a", ((0, math.inf),)),)))[0]
    assert len(text_of(Chart("t", "x", "y", (Curve("a", ((0, 1.0), (1, 1.0))),)))) == 9


LONE = Chart("t", "steps", "y", (Curve("a", ((4, 1.0),)), Curve("b", ((4, 1.0),))))
GAPS = Chart("t", "steps", "y", (Curve("a", ((0, 0.0), (1, 1.0), (2, math.nan), (3, 0.5), (4, math.inf))),))


def test_a_point_without_a_neighbour_is_a_dot_that_can_be_seen() -> None:
    _, *rows, ends, _ = text_of(LONE)
    axis, picture = zip(*(row.split("│") for row in rows), strict=True)

    assert [letter for row in picture for letter in row if letter != "\u2800"] == ["\u281b"]  # four dots of eight
    assert picture[3][len(picture[3]) // 2 - 1 : len(picture[3]) // 2 + 1].strip("\u2800") == "\u281b"
    assert [label.strip() for label in axis if label.strip()] == ["1"]
    assert ends.strip() == "4 steps"
    assert GAPS.curves[0].lone() == ((3, 0.5),)
    assert Curve("a", ()).lone() == ()


def test_a_point_without_a_neighbour_is_a_dot_in_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    axes = pytest.importorskip("matplotlib.axes").Axes
    dots: list[int] = []
    plot = axes.plot

    def noted(self: object, x: list[float], y: list[float], *style: str, **more: object) -> object:
        dots.extend([len(x)] * ("o" in style))
        return plot(self, x, y, *style, **more)

    monkeypatch.setattr(axes, "plot", noted)
    charts.picture([LONE, GAPS, CHART], "svg")

    assert dots == [1, 1, 1, 0, 1]


def test_pictures_are_drawn_and_the_same_each_time() -> None:
    pytest.importorskip("matplotlib")

    svg = charts.picture([CHART, CHART], "svg")

    assert svg == charts.picture([CHART, CHART], "svg")
    assert svg.startswith(b"<?xml")
    assert b"nan" not in svg.lower().replace(b"nano", b"")
    assert charts.picture([CHART], "png").startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(UsageError, match="pip install matplotlib"):
        charts.check(["png"])
    with pytest.raises(UsageError, match="png or svg, not as 'jpeg'"):
        charts.check(["jpeg"])
