from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
from fitcommand import HERE

from actbench.run import local, runner
from actbench.tools.fit import budgets


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


class Clock:
    """A clock that only simulations move on, each as it begins.

    Attributes:
        seconds_each: How far.
        left: How many simulations may begin before all time is over.
    """

    def __init__(self) -> None:
        self.now, self.seconds_each, self.left = 0.0, 0.0, math.inf

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of budgets."""
    clock, in_time = Clock(), budgets.Budget.may_begin

    def may_begin(budget: budgets.Budget) -> bool:
        clock.now += 0.0 if clock.left else 1e9
        if not in_time(budget):
            return False
        clock.left, clock.now = clock.left - 1, clock.now + clock.seconds_each
        return True

    monkeypatch.setattr(budgets, "time", clock)
    monkeypatch.setattr(budgets.Budget, "may_begin", may_begin)
    return clock
