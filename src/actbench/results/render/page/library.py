"""The JavaScript that draws charts: Vega-Lite, as vl-convert ships it, in one text of 0.9 MB."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from contextlib import suppress
from pathlib import Path

import platformdirs

from actbench.results.render import exports

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
    version = importlib.metadata.version("vl-convert-python")
    kept = platformdirs.user_cache_path("actbench") / f"vega-embed-{version}.js"
    with suppress(OSError, UnicodeDecodeError):
        if text := kept.read_text(encoding="utf-8"):
            return text
    text = str(importlib.import_module("vl_convert").javascript_bundle(_SNIPPET))
    _keep(kept, text)
    return text


def _keep(path: Path, text: str) -> None:
    """Write a text into the cache, completely or not at all; ignore a cache that cannot be written."""
    if path.is_absolute() and os.access(next(place for place in path.parents if place.exists()), os.W_OK):
        with suppress(Exception):
            exports.export({path: text})
