"""The events by which an experiment reports its progress, and the names of its cases in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TextIO

from actbench.model.data import CaseData, OutcomeData
from actbench.model.live import LiveMemory
from actbench.model.measured import Outcome
from actbench.model.records import Case
from actbench.report.tables.groups import told_settings, varying_settings

_TOLD_BY_SCHEME = {"optimizer", "generate", "script"}
"""Settings that a scheme's cell has, or that all cases of a script share."""


def names_among(cases: Sequence[CaseData]) -> dict[CaseData, str]:
    """Return a name for each case of an experiment, without what all of them share; a scheme is always named."""
    if not all(isinstance(case, Case) for case in cases):
        return {case: case.title for case in cases}
    measured = [case for case in cases if isinstance(case, Case)]
    varying = {name for name in ("scheme", "batch", "meter") if len({case.cells[name] for case in measured}) > 1}
    return {
        case: _name_of(case, varying, {key: value for key, value in settings.items() if key not in _TOLD_BY_SCHEME})
        for case, settings in zip(measured, varying_settings(measured), strict=True)
    }


def _name_of(case: Case, varying: Collection[str], settings: Mapping[str, Any]) -> str:
    cells = case.cells
    scheme = cells["scheme"] if "scheme" in varying or case.scheme != "exact" else ""
    batch = f"batch {cells['batch']}" if "batch" in varying and cells["batch"] else ""
    name = ", ".join(filter(None, (case.shown_model, scheme, batch))) + told_settings(settings)
    return f"{name} ({case.meter})" if "meter" in varying else name


class Progress:
    """Receives the events of an experiment and shows none; subclasses override those that they show.

    Cases that run side by side may tell it from several threads.
    """

    is_live: ClassVar[bool] = False
    """Whether it shows the memory of cases while they run, so that these report it."""

    def planned(self, cases: Sequence[CaseData], jobs: int = 1, *, more: bool = False) -> None:
        """These cases will be run, simulated ones up to ``jobs`` at a time; no other case is reported from now on.

        ``more`` is whether an unknown number will follow, as in a search.
        """

    def started(self, case: CaseData, steps: int = 0, done: int = 0) -> None:
        """The case starts, or starts afresh; a training run after ``done`` of its ``steps``."""

    def memory_read(self, case: Case, peak_bytes: int) -> None:
        """The peak of the case is known."""

    def round_timed(self, case: Case, steps: int) -> None:
        """One more round of the case was timed; ``steps`` counts its steps so far."""

    def measured(self, case: Case, outcome: Outcome) -> None:
        """The record of the case is stored, and the search for its largest batch is to come."""

    def searching(self, case: Case) -> None:
        """The search for the case's largest batch starts, with a prediction."""

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """The search for the case's largest batch tried one."""

    def stepped(self, done: int, loss: float) -> None:
        """The training run took one more step, ``done`` so far."""

    def noted(self, case: Case, text: str) -> None:
        """Something that the user should know of the case, such as that a simulated step takes long."""

    def reported(self, case: Case, report: LiveMemory) -> None:
        """The memory of the case as it is now, if :attr:`is_live`."""

    def finished(self, case: CaseData, outcome: OutcomeData) -> None:
        """The case ended and its record is stored."""

    def grouped(self, cases: Sequence[Case]) -> None:
        """These cases are measured one by one, then timed in turns: they end together."""

    def doing(self, text: str) -> None:
        """This is what goes on while no case is at work, such as "solving for plans"."""

    def message(self, text: str) -> None:
        """Something that the user should know."""

    def stream(self, own: TextIO) -> TextIO:
        """Return where others write what would go to a stream, so that what is shown stays whole."""
        return own
