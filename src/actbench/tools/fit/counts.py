"""How many simulations a fit needed, and which of them crashed: what its output says of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeGuard

from actbench.errors import shortened
from actbench.model.measured import Outcome
from actbench.model.records import Case, Failure
from actbench.units import counted


class Counts(NamedTuple):
    """How many simulations there were.

    Attributes:
        whole: Of the whole model, now; a plan has one for each memory limit that it is tried with.
        copies: Of copies with fewer blocks and of smaller models, now.
        taken: Those that the results file had, of both kinds.
    """

    whole: int
    copies: int
    taken: int

    def said(self, path: Path | None) -> list[str]:
        """Return what a remark says of them; ``path`` is the results file, if one is kept."""
        found = f"{counted(self.whole, 'simulation')} of the whole model"
        found += f", {self.copies} of smaller copies of it" if self.copies else ""
        if not self.taken:
            return [found]
        return [found, f"continued from {path}, which had {counted(self.taken, 'simulation')} of this fit"]


def is_crash(outcome: Outcome) -> TypeGuard[Failure]:
    """Whether a simulation crashed: its process died, or raised an error that nobody expected."""
    return isinstance(outcome, Failure) and outcome.reason == "crash"


def about_crashed(crashed: Mapping[Case, Failure], path: Path | None) -> tuple[str, ...]:
    """Return the line that says how many simulations crashed, and why the first did; none if none crashed."""
    if not crashed:
        return ()
    why = next(iter(crashed.values())).message.strip().partition("\n")[0]  # what torch adds fills pages
    see = f"; see {path}" if path is not None else ""
    count = counted(len(crashed), "simulation")
    return (f"{count} crashed, so plans may be missing: {shortened(why).rstrip('.')}{see}",)
