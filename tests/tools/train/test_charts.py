from __future__ import annotations

import math
import sys

import pytest

from actbench.errors import UsageError
from actbench.tools.train import charts
from actbench.tools.train.charts import Chart, Curve

CHART = Chart(
    "a title",
    "steps",
    "loss",
    (Curve("exact", ((0, 1.0), (10, 0.0)), (0.1, 0.1)), Curve("other", ((0, math.nan), (10, 0.5)))),
)


LONE = Chart("t", "steps", "y", (Curve("a", ((4, 1.0),)), Curve("b", ((4, 1.0),))))
GAPS = Chart("t", "steps", "y", (Curve("a", ((0, 0.0), (1, 1.0), (2, math.nan), (3, 0.5), (4, math.inf))),))


def test_a_point_without_a_neighbour_is_told_from_others() -> None:
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
