"""Where compiled kernels and computed tables are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def folder(name: str) -> Path | None:
    """Return a writable folder of this name in the user's cache, or None where there is none to be had.

    A cache only saves time, so a read-only home is not an error: what would have been kept is made again.
    """
    path = platformdirs.user_cache_path("actbench") / name
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return path if os.access(path, os.W_OK) else None
