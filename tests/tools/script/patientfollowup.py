"""``actbench.tools.script.followup`` with time for all answers, however slow the machine is."""

from __future__ import annotations

from actbench.tools.script import followup

followup.WORTH_SECONDS = 600.0  # type: ignore[misc]
Session, failure_of = followup.Session, followup.failure_of
