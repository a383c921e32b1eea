"""Where compiled kernels and computed tables are kept between runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import platformdirs


def folder(name: str, sources: Iterable[Path]) -> Path | None:
    """Return a writable folder in the user's cache for what exactly these sources make, or None where there is none.

    A cache only saves time, so a read-only home is not an error: what would have been kept is made again.

    Args:
        name: What is kept.
        sources: The files whose content decides what is kept; another content has another folder.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:12]
    path = platformdirs.user_cache_path("actbench") / f"{name}-{digest}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return path if os.access(path, os.W_OK) else None
