from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from fitcommand import HERE

from actbench.run import local, runner


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that makes steps up."""
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("fakefit")


@pytest.fixture
def log(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let steps be made up, and return the file that they are listed in."""
    monkeypatch.setattr("actbench.tools.fit.scripts._OF_MODELS", "fakefit")
    monkeypatch.setattr("actbench.tools.fit.fitting._needed", lambda *_: ())
    monkeypatch.setitem(runner.run_plan.__kwdefaults__, "bench", "fakefit")
    monkeypatch.setitem(runner.run_plan.__kwdefaults__, "preload", ())
    monkeypatch.setattr(local, "available_memory_bytes", lambda: 1 << 40)  # room for all that is made up, in one round
    path = tmp_path / "log"
    monkeypatch.setenv("FAKEFIT_LOG", str(path))
    return path
