"""Simulates a script and what is asked next, however long that takes within the time of the case."""

from __future__ import annotations

from actbench.tools.script import followup
from actbench.tools.script.bench import before_forks as before_forks, failure_of as failure_of  # a bench has them

__all__ = ["Session", "before_forks", "failure_of"]


class Session(followup.Session):
    """A script whose measurement has all of ``advised`` that its case has time for."""

    is_full = True
