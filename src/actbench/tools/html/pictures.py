"""The parts of a page beside its tables: charts in groups of comparable rows, their parts, and details of rows.

Charts are Vega-Lite: scales of bytes and seconds, tooltips, bars and lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from actbench.model.records import Failure, Record
from actbench.report.plain import plain
from actbench.units import GIB, KIB, MIB, counted, format_bytes

Row = TypeVar("Row")
Values = Sequence[Mapping[str, Any]]
"""The data of a chart: raw values in base units, with the values to draw and the texts to show."""


@dataclass(frozen=True)
class Picture:
    """One chart. ``spec`` is Vega-Lite with its data; names are only in the data, never in an expression."""

    title: str
    about: str
    spec: Mapping[str, Any]
    is_wide: bool = False


@dataclass(frozen=True)
class Group:
    """The charts of rows that can be compared, under a name for the reader to choose."""

    name: str
    pictures: tuple[Picture, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Details:
    """What the page shows when a reader opens a row of its first table, by heading."""

    texts: Mapping[str, str]
    is_estimated: bool = False


@dataclass(frozen=True)
class Beside:
    """What a page shows beside the tables.

    Attributes:
        details: Of the rows of the first table, in their order, or none.
        lacks_details: Whether there are none because the rows are more than :data:`MOST_DETAILED`.
    """

    groups: tuple[Group, ...] = ()
    details: tuple[Details, ...] = ()
    lacks_details: bool = False

    @property
    def has_charts(self) -> bool:
        """Whether there is anything to draw."""
        return any(group.pictures for group in self.groups)


MOST_DETAILED = 5000
"""Most rows with settings and commands; a larger table has none, so that the file stays small."""


def beside(groups: Iterable[Group], rows: Sequence[Row], details: Callable[[Row], Details]) -> Beside:
    """Return what a page shows beside a table of rows."""
    has_many = len(rows) > MOST_DETAILED
    return Beside(shown(groups), () if has_many else tuple(map(details, rows)), has_many)


MOST_GROUPS = 40
"""Most groups with charts on a page: a file of a few MB opens at once."""


def shown(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the groups for a page, those with the most charts first; no others are held meanwhile."""
    drawn: list[Group] = []
    left_out = 0
    for group in groups:
        if not group.pictures:
            continue
        drawn.append(group)
        drawn.sort(key=lambda each: -len(each.pictures))  # of equal ones the first stays
        if len(drawn) > MOST_GROUPS:
            left_out += 1
            drawn.pop()
    if not left_out:
        return tuple(drawn)
    remark = f"{left_out} more groups of rows have no charts here: make a report of fewer records."
    return tuple(Group(group.name, group.pictures, (*group.remarks, remark)) for group in drawn)


def texts_of(record: Record[Any, Any]) -> dict[str, str]:
    """Return the settings, command and machine of a record, by heading."""
    machine, versions, outcome = record.machine, record.versions, record.outcome
    device = f"{machine.gpu}, " if machine.gpu else ""
    commit = f" ({versions.commit[:12]}{', uncommitted changes' if versions.dirty else ''})" if versions.commit else ""
    numbers = versions.model_dump(exclude_none=True, exclude={"actbench", "commit", "dirty"})
    settings = (
        (name.replace("_", " "), value)
        for name, value in record.case.model_dump(exclude_none=True).items()
        if value is not False
    )
    found = {
        "Command": record.command,
        "Settings": ", ".join(name if value is True else f"{name} {value}" for name, value in settings),
        "Failure": f"{outcome.reason}: {outcome.message}" if isinstance(outcome, Failure) else "",
        "Warnings": "\n".join(getattr(outcome, "warnings", ())),
        "Machine": f"{machine.name}: {device}{machine.processor}, {counted(machine.cores, 'core')}, {machine.system}",
        "Versions": f"actbench {versions.actbench}{commit}, {', '.join(f'{k} {v}' for k, v in numbers.items())}",
        "Recorded": f"{record.recorded_at}, recipe {record.recipe}",
    }
    return {heading: plain(text) for heading, text in found.items() if text}


SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
HEIGHT = 300
_FEW_POWERS = 3
_STEP = 21  # pixels of one bar
_FAR = 2  # a limit that is so many times as large as all that is drawn would leave no room for it


@dataclass(frozen=True)
class Scale:
    """The unit of a chart, and its size in base units."""

    unit: str
    factor: float


def byte_scale(most: float) -> Scale:
    """Return the unit that suits amounts up to this many bytes."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if most >= factor:
            return Scale(unit, factor)
    return Scale("bytes", 1)


def second_scale(most: float) -> Scale:
    """Return the unit that suits times up to this many seconds."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if most >= factor:
            return Scale(unit, factor)
    return Scale("µs", 1e-6)


def spec(values: Values, layers: Sequence[Mapping[str, Any]], height: int = HEIGHT) -> dict[str, Any]:
    """Return a chart of layers over the same values, as wide as its place on the page.

    Marks may use the page's light or dark colours by name, ``ink``, ``dim`` and ``accent``, and labels beside a chart
    the pixels that they may take, ``label_limit``.
    """
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": list(values)},
        "layer": list(layers),
    }


def tooltip(**titles: str) -> list[dict[str, str]]:
    """Return the fields, with titles, that the pointer shows beside a mark."""
    return [{"field": field, "title": title, "type": "nominal"} for field, title in titles.items()]


def axis(field: str, title: str, **details: Any) -> dict[str, Any]:
    """Return an encoding of numbers along an axis that need not begin at zero."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False, "nice": True}, **details}


def colour(name: str) -> dict[str, str]:
    """Return a colour of the page."""
    return {"expr": name}


def colours_of(kinds: Mapping[str, str], *, offset: int) -> dict[str, Any]:
    """Return the encoding of kinds by their colours, with a legend so many pixels above the chart."""
    names = list(kinds)
    return {
        "field": "kind",
        "type": "nominal",
        "sort": names,
        "scale": {"domain": names, "range": list(kinds.values())},
        "legend": {"orient": "top", "title": None, "offset": offset},
    }


def about_limit(limit: int | None, most: float) -> str:
    """Return a sentence about a limit that is far above the most bytes that are drawn; an empty text if it is not."""
    if limit is None or most <= 0 or limit < _FAR * most:
        return ""
    return f" The limit, {format_bytes(limit)}, is {limit / most:.3g} times the most that is shown."


def limit_line(channel: str, limit: int | None, most: float, scale: Scale, **name: Any) -> list[dict[str, Any]]:
    """Return a named line at the memory limit; nothing if there is none, or if it is far above ``most`` bytes.

    ``name`` are properties of the name's mark, where its place is not the usual one.
    """
    if limit is None or about_limit(limit, most):
        return []
    place = {"datum": limit / scale.factor, "type": "quantitative"}
    data: dict[str, Any] = {"values": [{}]}
    rule = {"type": "rule", "color": colour("ink"), "strokeDash": [5, 4]}
    text = {
        "type": "text",
        "text": f"limit {format_bytes(limit)}",
        "color": colour("ink"),
        **_NAME_PLACES[channel],
        **name,
    }
    return [{"data": data, "mark": mark, "encoding": {channel: place}} for mark in (rule, text)]


_NAME_PLACES: dict[str, dict[str, Any]] = {
    "x": {"y": 0, "dy": -6, "align": "center", "baseline": "bottom"},
    "y": {"x": "width", "dy": -5, "align": "right", "baseline": "bottom"},
}


def stacked_bars(parts: Values, kinds: Mapping[str, str], scale: Scale, limit: int | None) -> Picture:
    """Return a bar for each row with the parts of its peak; ``kinds`` gives colours, and the order from the left."""
    totals: dict[str, float] = {}
    for part in parts:
        totals[part["name"]] = totals.get(part["name"], 0) + part["bytes"]
    names, most = list(totals), max(totals.values())
    rules = limit_line("x", limit, most, scale)
    present = [kind for kind in kinds if any(part["kind"] == kind for part in parts)]
    bars = {
        "mark": {"type": "bar", "height": {"band": 0.78}},
        "encoding": {
            "y": {
                "field": "name",
                "type": "nominal",
                "sort": names,
                "title": None,
                "axis": {"labelLimit": {"expr": "label_limit"}, "ticks": False, "domain": False, "labelPadding": 8},
            },
            "x": {"field": "drawn", "type": "quantitative", "stack": "zero", "title": f"peak ({scale.unit})"},
            "order": {"field": "order", "type": "quantitative"},
            "color": colours_of({kind: kinds[kind] for kind in present}, offset=22 if rules else 8),
            "tooltip": tooltip(name="scheme", kind="kind", text="bytes", peak_text="peak"),
        },
    }
    about = f"What is allocated at the peak, by kind.{about_limit(limit, most)}"
    return Picture("The peak by kind", about, spec(parts, [bars, *rules], _STEP * len(names)), is_wide=True)


def ticks_of(values: Sequence[float]) -> tuple[list[float], float]:
    """Return ticks at powers of ten for amounts that may be zero, and the least power."""
    positive = [value for value in values if value > 0]
    if not positive:
        return [0.0, 1.0], 1.0
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    stride = max(1, (last - first + 4) // 5)
    between = (1, 2, 5) if last - first <= _FEW_POWERS else (1,)
    return [0.0, *(many * 10.0**power for power in range(first, last + 1, stride) for many in between)], 10.0**first
