"""What draws charts: Vega-Lite, as vl-convert ships it, as a script of 0.9 MB for pages, or without a browser."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from actbench.caches import user_cache
from actbench.errors import UsageError
from actbench.report.render import exports
from actbench.tools.html.charts import SCHEMA, Picture

EXTRA = "pip install 'actbench[html]'"
"""The command that installs the library."""

_SNIPPET = "window.vegaEmbed = vegaEmbed;"


def is_installed() -> bool:
    """Return whether charts can be drawn here."""
    return importlib.util.find_spec("vl_convert") is not None


def script() -> str:
    """Return the script that defines ``vegaEmbed``.

    vl-convert takes several seconds to bundle it, so the script is stored in the user's cache, if that can be written.
    """
    kept = user_cache() / f"vega-embed-{importlib.metadata.version('vl-convert-python')}.js"
    with suppress(OSError, UnicodeDecodeError):
        if text := kept.read_text(encoding="utf-8"):
            return text
    text = str(importlib.import_module("vl_convert").javascript_bundle(_SNIPPET))
    if kept.is_absolute() and os.access(next(place for place in kept.parents if place.exists()), os.W_OK):
        with suppress(Exception):  # a cache that cannot be written
            exports.export({kept: text})
    return text


def check() -> None:
    """Raise a UsageError if the library that draws pictures is not installed."""
    if not is_installed():
        raise UsageError(f"pictures are drawn by vl-convert-python, which is not installed: {EXTRA}")


_WIDTH, _LETTERS = 760, 120
_SCALE = 2
"""Pixels of a PNG for one pixel of the chart."""
_DIM, _LINE = "#5f6770", "#e8ebee"
_PARAMS = {"ink": "#1f2328", "dim": _DIM, "accent": "#4c78a8", "label_limit": 0.42 * _WIDTH}
_LINES = {"gridColor": _LINE, "domainColor": _LINE, "tickColor": _LINE}
_CONFIG = {
    "background": "white",
    "view": {"stroke": None},
    "axis": {"labelColor": _DIM, "titleColor": _DIM, "titleFontWeight": 400, **_LINES},
    "legend": {"labelColor": _DIM},
    "title": {"color": _PARAMS["ink"], "subtitleColor": _DIM, "anchor": "start"},
}


def image(pictures: Sequence[Picture], kind: Literal["png", "svg"]) -> bytes:
    """Return charts below each other in one picture; a UsageError if what draws them is not installed."""
    check()
    charts = [
        {
            **{name: value for name, value in each.spec.items() if name not in ("$schema", "autosize")},
            "width": _WIDTH,
            "title": {"text": each.title, "subtitle": textwrap.wrap(each.about, _LETTERS), "offset": 12},
        }
        for each in pictures
    ]
    spec = {
        "$schema": SCHEMA,
        "config": _CONFIG,
        "params": [{"name": name, "value": value} for name, value in _PARAMS.items()],
        "vconcat": charts,
        "resolve": {"scale": {"color": "independent", "x": "independent", "y": "independent"}},
        "spacing": 40,
        "padding": 16,
    }
    draw = importlib.import_module("vl_convert")
    return bytes(draw.vegalite_to_png(spec, scale=_SCALE)) if kind == "png" else draw.vegalite_to_svg(spec).encode()
