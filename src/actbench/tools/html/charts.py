"""Charts as SVG: two axes, and marks at places in their units.

What has no colour of its own is drawn in that of the text around it, light or dark. A mark's title is what the pointer
shows, and what a screen reader says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from textwrap import wrap
from typing import Any, NamedTuple
from xml.etree import ElementTree

from actbench.units import GIB, KIB, MIB

Points = Iterable[tuple[float, float]]

BYTES = {"GiB": float(GIB), "MiB": float(MIB), "KiB": float(KIB), "bytes": 1.0}
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
PLAIN = {"": 1.0}

_SVG = "http://www.w3.org/2000/svg"
ACCENT = "#4c78a8"
DASHED: dict[str, Any] = {"stroke-dasharray": "4 3", "stroke-opacity": "0.6"}
_TICKS = 6
_ROUNDING = 1e-9
_LETTER, _LINE = 6.6, 18
"""Pixels of a letter and of a line of text."""
_MARGIN = 36
"""Pixels to the right of a chart, for what is written behind a bar."""
_SIZES = {True: 1120, False: 550}
_RIGHT_SHARE = 0.6
"""Names of points beyond this share of the width stand to the left of them."""
_SHAPES = {
    "circle": "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    "small": "M-2.5,0a2.5,2.5 0 1,0 5,0a2.5,2.5 0 1,0 -5,0",
    "diamond": "M0,-6.5L6.5,0L0,6.5L-6.5,0Z",
}


class Axis(NamedTuple):
    """What stands along one side of a chart.

    Attributes:
        title: What is drawn along it, with the unit.
        place: From a value to its share of the axis, 0 at the left or the bottom.
        ticks: Values with a line across the chart, and their labels.
    """

    title: str
    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


def linear(title: str, values: Iterable[float], units: Mapping[str, float] = PLAIN, *, is_exact: bool = False) -> Axis:
    """Return an axis of amounts in the unit that suits the largest; it ends at ticks, or exactly at the amounts."""
    values = list(values)
    low, high = min(values), max(values)
    unit, factor = next((each for each in units.items() if high >= each[1]), list(units.items())[-1])
    span = (high - low) / factor or abs(high) / factor or 1.0
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    step = next(power * many for many in (1, 2, 5, 10) if span / (power * many) <= _TICKS)
    inner, outer = (math.ceil, math.floor) if is_exact else (math.floor, math.ceil)
    begin, end = low / factor / step, high / factor / step
    close = -_ROUNDING if is_exact else _ROUNDING
    numbers = range(inner(begin + close), outer(end - close) + 1)
    ticks = [(number * step * factor, f"{number * step:.12g}") for number in numbers]
    first, last = (low, high) if is_exact else (ticks[0][0], ticks[-1][0])
    last += (first == last) * factor
    return Axis(f"{title} ({unit})" if unit else title, lambda value: (value - first) / (last - first), ticks)


def powers(title: str, values: Sequence[float]) -> Axis:
    """Return an axis of powers of ten that begins at zero."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    stride = max(1, (last - first + 4) // 5)
    least, most = 10.0**first, max(positive)
    ticks = [0.0, *(10.0**power for power in range(first, last + 1, stride) if 10.0**power <= most)]
    whole = math.log1p(most / least)
    return Axis(title, lambda value: math.log1p(value / least) / whole, [(tick, f"{tick:g}") for tick in ticks])


def bands(names: Sequence[str]) -> Axis:
    """Return an axis of rows from the top; the value of a row is its place."""
    return Axis("", lambda place: 1 - (place + 0.5) / len(names), list(enumerate(names)))


class Chart:
    """A chart with axes, to which marks are added.

    Args:
        x, y: Its axes.
        height: Pixels between the ends of the vertical axis.
        is_wide: Whether it is as wide as a page.
        legend: The colour of each name above the chart.
        has_lines: Whether ticks of the vertical axis have lines.
    """

    def __init__(
        self,
        x: Axis,
        y: Axis,
        *,
        height: int = 300,
        is_wide: bool = False,
        legend: Mapping[str, str] | None = None,
        has_lines: bool = True,
    ) -> None:
        self._x, self._y, self._height, self.is_wide, self.width = x, y, height, is_wide, _SIZES[is_wide]
        most = round(0.4 * self.width / _LETTER)  # letters of a label
        self._left = 34 + _LETTER * min(most, max(len(label) for _, label in y.ticks))
        self.svg = ElementTree.Element("svg", {"xmlns": _SVG})
        self._top = 8.0 + self._legend(legend or {}) + _LINE
        bottom = self._top + height
        for tick, label in y.ticks:
            place = self.at(0, tick)[1]
            cut = label if len(label) <= most else f"{label[: most - 1]}…"
            self.text(self._left - 8, place + 4, cut, label if cut != label else "", anchor="end")
            if has_lines:
                self.mark("path", d=f"M{self._left:.1f},{place:.1f}H{self.width - _MARGIN}", stroke_opacity=0.12)
        for tick, label in x.ticks:
            place = self.at(tick, 0)[0]
            self.text(place, bottom + 18, label, anchor="middle")
            self.mark("path", d=f"M{place:.1f},{self._top:.1f}V{bottom:.1f}", stroke_opacity=0.12)
        self.text((self._left + self.width) / 2, bottom + 38, x.title, anchor="middle")
        turned = f"rotate(-90 12 {self._top + height / 2:.1f})"
        self.text(12, self._top + height / 2, y.title, anchor="middle", transform=turned)
        self.height = round(bottom + 46)
        size = {"viewBox": f"0 0 {self.width} {self.height}", "width": self.width, "height": self.height}
        font = {"font-family": "system-ui, sans-serif", "font-size": 12, "fill": "currentColor"}
        self.svg.attrib.update({name: str(value) for name, value in (size | font).items()})

    def _legend(self, colours: Mapping[str, str]) -> float:
        """Draw names of colours in as many lines as they need, and return the height of these."""
        left, top = 12.0, 8.0
        for name, colour in colours.items():
            length = 28 + _LETTER * len(name)
            if left + length > self.width and left > 12:
                left, top = 12.0, top + _LINE
            self.mark("rect", x=left, y=top, width=11, height=11, fill=colour)
            self.text(left + 16, top + 10, name)
            left += length
        return top + _LINE if colours else 0.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixels of a place."""
        across = self._left + self._x.place(x) * (self.width - _MARGIN - self._left)
        return across, self._top + (1 - self._y.place(y)) * self._height

    def mark(self, tag: str, title: str = "", text: str = "", **attributes: Any) -> None:
        """Add an element; lines are drawn and not filled unless they have another colour."""
        drawn: dict[str, Any] = {"fill": "none", "stroke": "currentColor"} if tag == "path" else {}
        drawn |= {name.replace("_", "-"): value for name, value in attributes.items()}
        written = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in drawn.items()}
        element = ElementTree.SubElement(self.svg, tag, written)
        if title:
            element.set("role", "img")
            ElementTree.SubElement(element, "title").text = title
            element[0].tail = text
        else:
            element.text = text

    def text(self, x: float, y: float, text: str, title: str = "", *, anchor: str = "start", **attributes: Any) -> None:
        """Write at pixels."""
        if text:
            self.mark("text", title, text, x=x, y=y, text_anchor=anchor, **attributes)

    def line(self, points: Points, *, is_stepped: bool = False, back: Points = (), **style: Any) -> None:
        """Draw a line, or with the points of the way back an area."""
        forth, others = ([self.at(*point) for point in each] for each in (points, back))
        begin, *rest = forth
        to = "H{0:.1f}V{1:.1f}" if is_stepped else "L{0:.1f},{1:.1f}"
        turned = "V{1:.1f}H{0:.1f}" if is_stepped else to
        drawn = "".join(to.format(*point) for point in rest)
        if others:
            drawn += "L{:.1f},{:.1f}".format(*others[0]) + "".join(turned.format(*point) for point in others[1:]) + "Z"
        self.mark("path", d=f"M{begin[0]:.1f},{begin[1]:.1f}{drawn}", **style)

    def dot(self, x: float, y: float, title: str, shape: str = "circle", **style: Any) -> None:
        """Draw a point."""
        across, up = self.at(x, y)
        self.mark("path", title, d=_SHAPES[shape], transform=f"translate({across:.1f},{up:.1f})", **style)

    def bar(self, place: int, begin: float, end: float, title: str, colour: str) -> None:
        """Draw a bar, or a part of one, in a row of bands."""
        (left, middle), (right, _) = self.at(begin, place), self.at(end, place)
        self.mark("rect", title, x=left, y=middle - 8, width=right - left, height=16, fill=colour)

    def rule(self, text: str, *, x: float | None = None, y: float | None = None) -> None:
        """Draw a dashed line across the chart with a text at its beginning."""
        across, up = self.at(x or 0, y or 0)
        if x is None:
            self.mark("path", d=f"M{self._left:.1f},{up:.1f}H{self.width - _MARGIN}", **DASHED)
            self.text(self._left + 4, up - 5, text)
        else:
            self.mark("path", d=f"M{across:.1f},{self._top:.1f}v{self._height}", **DASHED)
            self.text(across, self._top - 5, text)

    def names(self, points: Iterable[tuple[float, float, str]]) -> None:
        """Write names beside points where there is room, the first first; the pointer shows those left out."""
        taken: list[tuple[float, float, float]] = []
        for x, y, name in points:
            (across, up), length = self.at(x, y), _LETTER * len(name)
            is_left = self._x.place(x) > _RIGHT_SHARE
            start = across - 8 - length if is_left else across + 8
            if not any(start < right and left < start + length and abs(up - at) < _LINE for left, right, at in taken):
                taken.append((start, start + length, up))
                self.text(across - 8 if is_left else across + 8, up - 8, name, anchor="end" if is_left else "start")

    def __str__(self) -> str:
        return ElementTree.tostring(self.svg, encoding="unicode")


class Picture(NamedTuple):
    """A chart with its title and what is said of it."""

    title: str
    about: str
    chart: Chart


def below_each_other(pictures: Sequence[Picture]) -> str:
    """Return one SVG of charts with their titles, black on white."""
    width, top = max(picture.chart.width for picture in pictures) + 32, 12
    whole = ElementTree.Element("svg", {"xmlns": _SVG, "color": "#1f2328", "font-family": "system-ui, sans-serif"})
    ElementTree.SubElement(whole, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    for picture in pictures:
        for size, text in ((16, picture.title), (12, picture.about)):
            for line in wrap(text, round(width / (0.6 * size))):
                top += 20
                place = {"x": "16", "y": str(top), "font-size": str(size), "fill": "currentColor"}
                ElementTree.SubElement(whole, "text", place).text = line
        drawn = copy(picture.chart.svg)
        drawn.attrib = {**drawn.attrib, "x": "16", "y": str(top + 8)}
        whole.append(drawn)
        top += 24 + picture.chart.height
    whole.attrib |= {"width": str(width), "height": str(top), "viewBox": f"0 0 {width} {top}"}
    return ElementTree.tostring(whole, encoding="unicode") + "\n"
