from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
from fitcommand import HERE

from actbench.run import local, runner
from actbench.tools.fit import budget


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that makes steps up."""
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("fakefit")


@pytest.fixture
def log(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let steps be made up, and return the file that they are listed in."""
    monkeypatch.setattr("actbench.tools.fit.scripts._OF_MODELS", "fakefit")
    monkeypatch.setattr("actbench.tools.fit.simulations._needed", lambda *_: ((), ()))
    monkeypatch.setitem(runner.run_plan.__kwdefaults__, "bench", "fakefit")
    monkeypatch.setitem(runner.run_plan.__kwdefaults__, "preload", ())
    monkeypatch.setattr(local, "available_memory_bytes", lambda: 1 << 40)  # room for all that is made up, in one round
    path = tmp_path / "log"
    monkeypatch.setenv("FAKEFIT_LOG", str(path))
    return path


class Clock:
    """A clock that only simulations move on.

    Attributes:
        seconds_each: How far each does.
        left: How many simulations there are before all time is over.
    """

    def __init__(self, log: Path) -> None:
        self._log, self.seconds_each, self.left = log, 0.0, math.inf

    def monotonic(self) -> float:
        simulated = len(self._log.read_text().splitlines()) if self._log.exists() else 0
        return self.seconds_each * simulated if simulated < self.left else 1e9


@pytest.fixture
def clock(log: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of budgets; what is at work always ends."""
    clock = Clock(log)
    monkeypatch.setattr(budget, "time", clock)
    monkeypatch.setattr(budget.Budget, "may_go_on", lambda _: True)
    return clock
