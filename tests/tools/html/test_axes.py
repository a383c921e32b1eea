"""Charts: marks lie where their axes say, names do not overlap, far limits are words, timelines share axes."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from actbench.model.timeline import Holder, Span, Timeline
from actbench.tools.html.charts import BYTES, SECONDS, Chart, Picture, linear, powers
from actbench.tools.html.pictures import Row, memory_over_steps, stacked_bars
from actbench.units import GIB, MIB

NAMES = ("exact", "checkpoint", "a-scheme-with-a-very-long-name:3,only=encoder.layer.[0-11]+another:2,every=2")


def bars(most_mib: float, limit: int | None) -> Picture:
    parts = {"weights": round(most_mib * 0.25 * MIB), "saved tensors": round(most_mib * 0.75 * MIB)}
    return stacked_bars([Row(name, name, "cpu", 1, None, False, False, None, None, parts) for name in NAMES], limit)


def elements(picture: Picture, tag: str) -> list[ElementTree.Element]:
    """Return the marks of a kind that have a title."""
    svg = ElementTree.fromstring(str(picture.chart))
    return [each for each in svg.iter(f"{{http://www.w3.org/2000/svg}}{tag}") if len(each)]


def texts(picture: Picture) -> list[str]:
    return list(ElementTree.fromstring(str(picture.chart)).itertext())


def test_bars_have_room_beside_their_names_and_are_as_long_as_their_bytes() -> None:
    picture = bars(100.0, None)
    spans = [(float(each.get("x") or 0), float(each.get("width") or 0)) for each in elements(picture, "rect")]

    assert len(spans) == len(NAMES) * 2
    assert max(left + width for left, width in spans) <= picture.chart.width
    assert sum(width for _, width in spans[:2]) > 0.5 * (picture.chart.width - spans[0][0])
    assert spans[1][1] == pytest.approx(3 * spans[0][1], abs=0.02)
    assert spans[1][0] == pytest.approx(sum(spans[0]), abs=0.02), "the parts of a bar follow each other"
    (cut,) = [text for text in texts(picture) if text.endswith("…")]
    assert NAMES[2].startswith(cut[:-1])
    assert NAMES[2] in texts(picture), "the pointer shows it whole"


def test_a_small_model_on_a_large_card_shows_its_bars_and_the_limit_in_words() -> None:
    picture = bars(100.0, 16 * GIB)

    assert not any(text.startswith("limit") for text in texts(picture))
    assert picture.about.endswith("The limit, 16.00 GiB, is 164 times the most that is shown.")
    assert max(float(each.get("width") or 0) for each in elements(picture, "rect")) > 300


def test_a_limit_that_is_near_is_a_line() -> None:
    picture = bars(100.0, 150 * MIB)

    assert "limit 150.00 MiB" in texts(picture)
    assert "The limit" not in picture.about


@pytest.mark.parametrize(
    ("values", "units", "title", "labels"),
    [
        ((0, 7.9 * GIB), BYTES, "t (GiB)", ["0", "2", "4", "6", "8"]),
        ((1.2e-3, 1.9e-3), SECONDS, "t (ms)", ["1.2", "1.4", "1.6", "1.8", "2"]),
        ((3.0,), SECONDS, "t (s)", ["3"]),
        ((0, 0), BYTES, "t (bytes)", ["0"]),
        ((-0.5, 0.5), {"": 1.0}, "t", ["-0.6", "-0.4", "-0.2", "0", "0.2", "0.4", "0.6"]),
    ],
)
def test_ticks_are_round_and_no_amount_lies_beyond_them(values, units, title: str, labels: list[str]) -> None:
    axis = linear("t", values, units)

    assert axis.title == title
    assert [label for _, label in axis.ticks] == labels
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)


def test_errors_lie_by_their_powers_and_zero_is_exact() -> None:
    axis = powers("error", [0.0, 1e-3, 0.5])

    assert [label for _, label in axis.ticks] == ["0", "0.001", "0.01", "0.1"]
    assert (axis.place(0.0), axis.place(0.5)) == (0.0, 1.0)
    assert axis.place(0.1) - axis.place(0.01) == pytest.approx(math.log(10) / math.log(501), rel=0.1)
    assert powers("error", [0.0]).place(0.0) == 0.0


def test_names_that_would_overlap_are_left_out() -> None:
    chart = Chart(linear("x", [0, 1]), linear("y", [0, 10]))
    chart.names([(0.1, 2.0, "best"), (0.11, 2.1, "beaten"), (0.11, 8.0, "far"), (1.0, 2.0, "right")])
    picture = Picture("", "", chart)

    assert [name for name in ("best", "beaten", "far", "right") if name in texts(picture)] == ["best", "far", "right"]
    (right,) = [each for each in chart.svg if each.text == "right"]
    assert right.get("text-anchor") == "end", "it stands to the left of its point"


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


def test_timelines_that_are_compared_have_the_same_axes() -> None:
    pictures = memory_over_steps(
        [
            ("exact", timeline(4 * GIB, 900)),
            ("checkpoint", timeline(MIB, 1200)),
            ("offload", timeline(MIB, 90, 5 * GIB)),
        ]
    )

    assert len({picture.chart.at(1200, 5 * GIB) for picture in pictures}) == 1
    assert all({"allocations and frees", "alive (GiB)"} <= set(texts(picture)) for picture in pictures)
    assert pictures[0].title == "Memory over a step: exact"
