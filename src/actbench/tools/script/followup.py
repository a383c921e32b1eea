"""Simulates a script, and then what is asked next: what the best remedy saves, and how large a batch fits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

from actbench.errors import MeasurementError
from actbench.model.measured import Advised, Measurement
from actbench.model.records import Failure
from actbench.tools.script import bench
from actbench.tools.script.answers.answer import SEARCH_SECONDS, WORTH_SECONDS
from actbench.tools.script.answers.suggestions import run_bytes, suggestions
from actbench.tools.script.bench import before_forks as before_forks, failure_of as failure_of  # a bench has them
from actbench.tools.script.trials import Finish, Forked, largest_batch

__all__ = ["Session", "before_forks", "failure_of"]

_SEARCHES: Final = 3
"""Simulations of a usual search for the largest batch: half or double the script's own, the predicted, the next."""

_TRIES: Final = 2
"""Schemes that are tried where the first one cannot be simulated."""

_WHOLE_SECONDS: Final = 60.0
"""Time of a whole run up to which it is run again, each time in at most twice that: --timeout is for all together."""

_CHOSEN: Final = 0.5
"""The share of what only a real run knows that is expected."""

_MARGIN_SECONDS: Final = 5.0
"""Time that is left of --timeout when what follows a run has ended."""

_LONGEST_SECONDS: Final = 86_400.0
"""What a case without --timeout has."""

_STEPS: Final = 3
"""Steps of a trial of a whole run, of which an early one has the largest batch."""


class Session(bench.Session):
    """A script whose measurement also has ``advised``, as far as that is known in a short time.

    Attributes:
        is_full: Whether simulations for it may take all the time of the case.
    """

    is_full: ClassVar[bool] = False

    def memory(self) -> Measurement:
        """Run the script, and run it again with the best remedy and with other batches, each in its own process."""
        found = super().memory()
        if self.case.meter != "simulated" or self.case.scheme != "exact":
            return found
        worth = min(self._left(), _LONGEST_SECONDS) if self.is_full else WORTH_SECONDS
        own = min(self.seconds, _WHOLE_SECONDS) if self.script.whole else 0.0
        limit = max(worth, 2 * own)
        has_time = self.seconds <= self._left()
        is_slow = not has_time or self.seconds > (max(_WHOLE_SECONDS, worth) if self.script.whole else worth)
        advised = Advised(is_slow=is_slow, limit_seconds=limit, is_full=self.is_full)
        if not has_time:
            return found.model_copy(update={"advised": advised})
        if not advised.is_slow:
            found = self._expected(found, limit)
            is_short = self.script.whole or _SEARCHES * self.seconds <= worth
            search = partial(self._searched, found) if is_short and not self.case.find_largest_batch else None
            advised = self._remedied(found, advised, limit, search)
        return found.model_copy(update={"advised": advised})

    def _left(self) -> float:
        """Return the seconds for what follows, of those that the case may take: --timeout is for all together."""
        return max(0.0, self.ends_at - time.monotonic() - _MARGIN_SECONDS)

    def _expected(self, found: Measurement, limit: float) -> Measurement:
        """Return a measurement that is an upper bound with what is expected, where that can be simulated."""
        if not found.at_most:
            return found
        self.note("as is expected")
        other = bench.Session(self.case, timeline=False, drawn=self.drawn)
        other.chosen = _CHOSEN
        simulated = Forked(_silent(other.run_as_it_is)).outcome(min(limit, self._left()))
        if isinstance(simulated, Failure) or run_bytes(simulated) > run_bytes(found):
            return found
        expected = {(each.part, each.line): each.needed_bytes for each in simulated.events}
        events = tuple(
            each.model_copy(update={"expected_bytes": expected.get((each.part, each.line))}) for each in found.events
        )
        return found.model_copy(update={"expected_bytes": run_bytes(simulated), "events": events})

    def _remedied(
        self, found: Measurement, advised: Advised, limit: float, search: Callable[[Advised], Advised] | None
    ) -> Advised:
        """Return the advice with the numbers of the first scheme worth trying that can be simulated.

        The search, if any, runs beside the first simulation. Of a whole run that is steps and saves, a few steps tell:
        an early one has the largest batch.
        """
        script, saves = self.script, [each for each in found.events if not each.is_step]
        is_even = found.growth is None or not found.growth.is_lasting
        if script.whole and is_even and all(each.part == "save" for each in saves):
            script = script.model_copy(update={"steps": _STEPS})
        else:
            saves = []

        def begin(scheme: str) -> Forked:
            self.note(f"with {scheme}")
            case = self.case.model_copy(update={"scheme": scheme, "script": script})
            other = bench.Session(case, timeline=False, drawn=self.drawn)
            return Forked(_silent(other.run_as_it_is))

        names = [each.scheme for each in suggestions(found)[:_TRIES]]
        first = begin(names[0]) if names else None
        if search is not None:
            advised = search(advised)
        for name in names:
            trial, first = first or begin(name), None
            simulated = trial.outcome(min(limit, self._left()))
            if isinstance(simulated, Failure):
                if simulated.reason == "timeout":
                    return advised.model_copy(update={"is_slow": True})
                continue
            simulated = simulated.model_copy(update={"events": (*simulated.events, *saves)})
            if run_bytes(simulated) >= run_bytes(found):
                continue
            worst = simulated.worst
            return advised.model_copy(
                update={
                    "scheme": name,
                    "needed_bytes": run_bytes(simulated),
                    "over_limit_bytes": simulated.over_limit_bytes if worst is None else worst.over_limit_bytes,
                    "step_seconds": simulated.estimated.step_seconds if simulated.estimated else None,
                }
            )
        return advised

    def _searched(self, found: Measurement, advised: Advised) -> Advised:
        """Return the advice with the largest batch that fits, where the script has a loader of batches, and in time."""
        usual = WORTH_SECONDS if self.script.whole else SEARCH_SECONDS  # a whole run takes long enough by itself
        until = time.monotonic() + min(_LONGEST_SECONDS if self.is_full else usual, self._left())
        limit, has_loader = found.memory_limit_bytes, found.built is not None and found.built.batch_size is not None
        if limit is None or not has_loader:
            return advised
        fitting: list[int] = []

        def tried(batch: int, fits: bool) -> None:
            self.tried(batch, fits)
            if fits:
                fitting.append(batch)

        try:
            largest = largest_batch(
                lambda batch, finish: _silent(partial(self._trial, batch))(finish),
                found,
                limit,
                tried,
                lambda: max(0.0, until - time.monotonic()),
            )
        except MeasurementError:  # as where the data has no batch of that size
            is_slow = time.monotonic() >= until
            most = max(fitting, default=None) if is_slow else None
            return advised.model_copy(update={"is_search_slow": is_slow, "fitting_batch": most})
        return advised.model_copy(update={"largest_batch": largest.batch_size})

    def _trial(self, rows: int, finish: Finish) -> Measurement:
        if not self.script.whole:
            return super()._trial(rows, finish)
        return self._run(
            self.script.model_copy(update={"batch_size": rows, "steps": _STEPS}), lambda number, step: None, finish
        )


def _silent(run: Callable[[Finish], Measurement]) -> Callable[[Finish], Measurement]:
    """Return what runs a script in a process of its own, and lets it print nothing: it printed the same before."""

    def ran(finish: Finish) -> Measurement:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        return run(finish)

    return ran
