"""How many simulations a fit needed, and which of them failed: what its output says of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeGuard

from actbench.errors import shortened
from actbench.model.measured import Outcome
from actbench.model.records import Case, Failure
from actbench.model.spec import parse_spec
from actbench.units import counted


class Counts(NamedTuple):
    """How many simulations there were.

    Attributes:
        whole: Of the whole model, now; a plan has one for each memory limit that it is tried with.
        copies: Of copies with fewer blocks and of smaller models, now.
        taken: Those that the results file had, of both kinds.
        error: The most that a joined peak was off one that was then simulated whole; None if none was.
    """

    whole: int
    copies: int
    taken: int
    error: float | None = None

    def said(self, path: Path | None) -> list[str]:
        """Return what a remark says of them; ``path`` is the results file, if one is kept."""
        found = f"{counted(self.whole, 'simulation')} of the whole model"
        found += f", {self.copies} of smaller copies of it" if self.copies else ""
        if self.error is not None:
            found += f"; joined peaks were off by {100 * self.error:.2f} % at most where they were simulated, too"
        if not self.taken:
            return [found]
        return [found, f"continued from {path}, which had {counted(self.taken, 'simulation')} of this fit"]


def is_crash(outcome: Outcome) -> TypeGuard[Failure]:
    """Whether a simulation crashed: its process died, or raised an error that nobody expected."""
    return isinstance(outcome, Failure) and outcome.reason == "crash"


def is_refusal(outcome: Outcome | None) -> bool:
    """Return whether a case cannot be simulated; one that crashed or ran out of time may be, the next time."""
    return isinstance(outcome, Failure) and outcome.reason not in ("timeout", "crash")


def about_crashed(crashed: Mapping[Case, Failure], path: Path | None) -> tuple[str, ...]:
    """Return the line that says which simulations crashed, and why the first did; none if none crashed."""
    if not crashed:
        return ()
    why = next(iter(crashed.values())).message.strip().partition("\n")[0]  # what torch adds fills pages
    see = f"; see {path}" if path is not None else ""
    whose = "your script" if next(iter(crashed)).script is not None else "your model"
    kinds = dict.fromkeys("+".join(part.name for part in parse_spec(case.scheme)) for case in crashed)
    more = f" and {len(kinds) - _NAMED} more" if len(kinds) > _NAMED else ""
    count, names = counted(len(crashed), "simulation"), ", ".join([*kinds][:_NAMED])
    said = f"{count} crashed, a fault of actbench and not of {whose}, so plans may be missing: {names}{more}"
    return (f"{said}. The first: {shortened(why).rstrip('.')}{see}",)


_NAMED = 8  # schemes that crashed; more are counted
