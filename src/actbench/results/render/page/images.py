"""Charts of pages as pictures, drawn without a browser or a network."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

from actbench.errors import UsageError
from actbench.results.render.page import library, marks
from actbench.results.render.page.pictures import Picture

Format = Literal["png", "svg"]
_WIDTH = 760
_LETTERS = 120
_SCALE = 2
"""Pixels of a PNG for one pixel of the chart."""

_INK, _DIM, _LINE = "#1f2328", "#5f6770", "#e8ebee"
_COLOURS = {"ink": _INK, "dim": _DIM, "accent": "#4c78a8"}
_CONFIG = {
    "background": "white",
    "view": {"stroke": None},
    "axis": {
        "labelColor": _DIM,
        "titleColor": _DIM,
        "titleFontWeight": 400,
        "gridColor": _LINE,
        "domainColor": _LINE,
        "tickColor": _LINE,
    },
    "legend": {"labelColor": _DIM},
    "title": {"color": _INK, "subtitleColor": _DIM, "anchor": "start"},
}


def check() -> None:
    """Check that pictures can be drawn here.

    Raises:
        UsageError: The library that draws them is not installed.
    """
    if not library.is_installed():
        raise UsageError(f"pictures are drawn by vl-convert-python, which is not installed: {library.EXTRA}")


def image(pictures: Sequence[Picture], kind: Format) -> bytes:
    """Return charts below each other in one picture.

    Raises:
        UsageError: What draws them is not installed.
    """
    check()
    spec = {
        "$schema": marks.SCHEMA,
        "config": _CONFIG,
        "params": [{"name": name, "value": value} for name, value in _COLOURS.items()],
        "vconcat": [_placed(picture) for picture in pictures],
        "resolve": {"scale": {"color": "independent", "x": "independent", "y": "independent"}},
        "spacing": 40,
        "padding": 16,
    }
    draw = importlib.import_module("vl_convert")
    if kind == "png":
        return bytes(draw.vegalite_to_png(spec, scale=_SCALE))
    return str(draw.vegalite_to_svg(spec)).encode()


def _placed(picture: Picture) -> dict[str, Any]:
    chart = {name: value for name, value in picture.spec.items() if name not in ("$schema", "autosize")}
    title = {"text": picture.title, "subtitle": textwrap.wrap(picture.about, _LETTERS), "offset": 12}
    return {**chart, "width": _WIDTH, "title": title}
