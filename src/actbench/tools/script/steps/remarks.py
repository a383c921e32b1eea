"""Remarks on the figures of a simulated script: what its steps were, and what it needs outside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from actbench.model.records import differ
from actbench.tools.script.steps.steps import Steps
from actbench.units import counted, format_bytes


class Bounds:
    """Notes what makes the bytes of a script a bound or an estimate, with the line that runs.

    Attributes:
        most: Why bytes may be fewer; ``shares`` why they may be others.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self.most: dict[str, None] = {}
        self.shares: dict[str, None] = {}

    def at_most(self, operator: str) -> None:
        """Note an operator whose result is the largest possible one."""
        self.most[f"{operator} makes as many elements as it can at {self._line() or 'an unknown line'}"] = None

    def share(self, operator: str) -> None:
        """Note an operator that chooses an equal share."""
        where = self._line() or "an unknown line"
        self.shares[f"{operator} is taken to choose an equal share of the elements at {where}"] = None


def about_steps(steps: Steps, began: int, *, has_state: bool = False, whole: bool = False) -> Iterator[str]:
    """Yield remarks if steps differ, if the one that is shown ran before others, and on what no step has seen.

    ``began`` is the number of the step that makes optimizer state, unless that step ``has_state`` before. A ``whole``
    run shows its steps by themselves.
    """
    if not steps.trains:
        return
    peaks, shown = steps.peaks(began), steps.largest(began)
    if differ(peaks) and not whole:
        yield (
            f"Steps differ ({format_bytes(min(peaks))} to {format_bytes(max(peaks))}); the largest is shown. --steps N "
            "runs more."
        )
    if steps.makes_state and not has_state and any(shown is each for each in steps.done[:began]):
        which = "no step" if len(steps.done) <= began else f"no step of {shown.rows} rows"
        yield (
            f"{which} began with the optimizer's state: a later step holds the state from its beginning, so its peak "
            "may be larger; let the script take three steps"
        )
    unseen = steps.turns.waiting(1)
    if unseen:
        names = ", ".join(dict.fromkeys(type(each).__name__ for each in unseen))
        yield (
            f"{names}: made, but did not step in {counted(len(steps.done), 'step')}; what its steps need is "
            "not in the figures, and --steps N runs more"
        )
    if steps.are_passes:
        yield (
            f"no optimizer of torch was made in {steps.passes:,} backward passes: the script is taken to update its "
            "weights itself, and each pass to end a step"
        )
        return
    idle = steps.passes - steps.updated_at
    if idle > max(1, *(len(each.forwards) for each in steps.done)):
        yield (
            f"{idle:,} backward passes ran after the last step of an optimizer of torch: what they need is not in the "
            "figures"
        )


def about_outside(most_bytes: int, peak_bytes: int) -> Iterator[str]:
    """Yield a remark on a peak of the script that is larger than that of a step: before steps, or between them."""
    if most_bytes > 1.01 * peak_bytes:
        yield (
            f"the script needs {format_bytes(most_bytes)} outside of the steps that are shown: as it begins, or "
            "between steps; reserved memory includes it"
        )
