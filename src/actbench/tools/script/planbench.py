"""Simulates a script for ``actbench fit``, which plans what to do with each block of the model that it trains."""

from __future__ import annotations

from typing import ClassVar

from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.tools.script import bench
from actbench.tools.script.bench import before_forks as before_forks, failure_of as failure_of  # a bench has them
from actbench.tools.script.declared import check_script
from actbench.tools.script.experiment import APPLIED as CHANGES
from actbench.tools.script.steps.counting import Step

__all__ = ["CHANGES", "Session", "before_forks", "check", "failure_of"]

_USAGE = 'name the script as python takes it, with its arguments, in quotes: --script "train.py --lr 3e-4"'


class Session(bench.Session):
    """A script whose measurement also has ``blocks`` and, if it tells the step, ``trace``: of the one trained model."""

    reads_blocks: ClassVar[bool] = True

    def __init__(self, case: Case) -> None:
        super().__init__(case, timeline=False)

    def _say(self, number: int, step: Step) -> None:
        """Say nothing of single steps: many cases run."""


def check(script: Script) -> None:
    """Check that a script can be run; a UsageError if not."""
    check_script(script, _USAGE)
