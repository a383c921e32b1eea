"""What a sweep tells of its progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actbench.records import Case, Outcome


class Progress(Protocol):
    """Told what happens in a sweep; several simulated cases at once may tell it from threads of their own."""

    def planned(self, cases: Sequence[Case], jobs: int) -> None:
        """The sweep will measure these cases, simulated ones up to ``jobs`` at a time."""
        ...

    def skipped(self, case: Case) -> None:
        """The case stands in the results already."""
        ...

    def started(self, case: Case) -> None:
        """The case starts, or starts afresh."""
        ...

    def memory_read(self, case: Case, peak_bytes: int) -> None:
        """The peak of the case is known."""
        ...

    def round_timed(self, case: Case, steps: int) -> None:
        """One more round of the case was timed, which makes ``steps`` steps of it."""
        ...

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """The search for the case's largest batch tried one."""
        ...

    def finished(self, case: Case, outcome: Outcome) -> None:
        """The case ended and its record is stored."""
        ...

    def message(self, text: str) -> None:
        """Something that the user should know."""
        ...


class Silent:
    """Progress that nobody looks at."""

    def planned(self, cases: Sequence[Case], jobs: int) -> None:
        """Say nothing."""

    def skipped(self, case: Case) -> None:
        """Say nothing."""

    def started(self, case: Case) -> None:
        """Say nothing."""

    def memory_read(self, case: Case, peak_bytes: int) -> None:
        """Say nothing."""

    def round_timed(self, case: Case, steps: int) -> None:
        """Say nothing."""

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """Say nothing."""

    def finished(self, case: Case, outcome: Outcome) -> None:
        """Say nothing."""

    def message(self, text: str) -> None:
        """Say nothing."""
