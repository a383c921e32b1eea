"""The axes of charts: bars have room on a narrow page, limits that are far away are words, timelines share axes."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from actbench.model.timeline import Holder, Span, Timeline
from actbench.tools.html import library
from actbench.tools.html.charts import Picture, Scale, memory_over_steps, stacked_bars
from actbench.tools.html.html import resource
from actbench.units import GIB, MIB

SVG = "{http://www.w3.org/2000/svg}"
KINDS = {"weights": "#5b7fa6", "saved for backward": "#cf6a63"}
NAMES = ("exact", "checkpoint", "a-scheme-with-a-very-long-name:3,only=encoder.layer.[0-11]+another:2,every=2")


def bars(most_mib: float, limit: int | None) -> Picture:
    parts = [
        {"name": name, "kind": kind, "order": order, "bytes": size * MIB, "drawn": size, "text": "", "peak_text": ""}
        for name in NAMES
        for order, (kind, size) in enumerate(zip(KINDS, (most_mib * 0.25, most_mib * 0.75), strict=True))
    ]
    return stacked_bars(parts, KINDS, Scale("MiB", MIB), limit)


def svg_of(picture: Picture, width: int) -> ElementTree.Element:
    """Return the chart as a page of this width draws it: ``charts.js`` gives labels a share of the width."""
    import vl_convert

    script = resource("charts.js")
    found = re.search(r"label_limit: Math.min\((\d+), ([\d.]+) \* width\)", script)
    assert found is not None
    most, share = map(float, found.groups())
    colours = {"ink": "#000", "dim": "#777", "accent": "#00f", "label_limit": min(most, share * width)}
    params = [{"name": name, "value": value} for name, value in colours.items()]
    spec = {**picture.spec, "width": width, "params": params, "config": {"legend": {"columns": 2}}}
    return ElementTree.fromstring(vl_convert.vegalite_to_svg(spec))


def bars_in(svg: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the left and right end of each bar, and check that it is inside of the picture."""
    marks = [each for each in svg.iter(f"{SVG}path") if each.get("aria-roledescription") == "bar"]
    ends = []
    for mark in marks:
        start, across = re.findall(r"M([\d.]+),[\d.]+h([\d.]+)", mark.get("d") or "")[0]
        ends.append((float(start), float(start) + float(across)))
    return ends


@pytest.mark.skipif(not library.is_installed(), reason="vl-convert is not installed")
@pytest.mark.parametrize("width", [320, 1300])
def test_bars_have_room_beside_their_names(width: int) -> None:
    svg = svg_of(bars(100.0, None), width)
    ends = bars_in(svg)
    room = max(right for _, right in ends)

    assert len(ends) == len(NAMES) * len(KINDS)
    assert float(svg.get("width") or 0) <= width + 1
    assert room > 0.3 * width
    assert all(right > left for left, right in ends)


@pytest.mark.skipif(not library.is_installed(), reason="vl-convert is not installed")
def test_a_small_model_on_a_large_card_shows_its_bars_and_the_limit_in_words() -> None:
    picture = bars(100.0, 16 * GIB)
    svg = svg_of(picture, 800)
    longest = max(right for _, right in bars_in(svg))

    assert "limit 16" not in json.dumps(picture.spec["layer"])
    assert picture.about.endswith("The limit, 16.00 GiB, is 164 times the most that is shown.")
    assert longest > 300


def test_a_limit_that_is_near_is_a_line() -> None:
    picture = bars(100.0, 150 * MIB)

    assert "limit 150.00 MiB" in json.dumps(picture.spec["layer"])
    assert "The limit" not in picture.about


def timeline(peak: int, events: int, host: int = 0) -> Timeline:
    return Timeline(
        peak_bytes=peak,
        peak_event=1,
        events=events,
        moments=(0, 1, events),
        held_bytes={"saved": (0, peak, 0), **({"host": (0, 0, host)} if host else {})},
        spans=(Span(phase="forward", start=0),),
        holders=(Holder(module="m", kind="saved", operator="mm", tensors=1, held_bytes=peak),),
    )


def axes(picture: Picture) -> dict[str, tuple[Any, Any, str]]:
    """Return the ends and the title of both axes of the areas."""
    encoding = picture.spec["layer"][0]["encoding"]
    return {name: (*encoding[name]["scale"]["domain"], encoding[name]["title"]) for name in ("x", "y")}


def test_timelines_that_are_compared_have_the_same_axes() -> None:
    pictures = memory_over_steps(
        [
            ("exact", timeline(4 * GIB, 900)),
            ("checkpoint", timeline(MIB, 1200)),
            ("offload", timeline(MIB, 90, 5 * GIB)),
        ]
    )

    assert [axes(picture) for picture in pictures] == [
        {"x": (0, 1200, "allocations and frees"), "y": (0, 5.0, "alive (GiB)")}
    ] * 3
    assert pictures[0].title == "Memory over a step: exact"
