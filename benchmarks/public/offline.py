"""Run a script whose downloads are there already: what it asks the network for comes from an empty archive."""

from __future__ import annotations

import io
import runpy
import sys
import tarfile
from pathlib import Path
from typing import Any

import requests


class _Archive:
    """An answer of the network, which holds nothing: the files that were in it are made up beside the script."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.raw = io.BytesIO()
        with tarfile.open(fileobj=self.raw, mode="w:gz"):
            pass
        self.raw.seek(0)

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()


requests.get = _Archive
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
