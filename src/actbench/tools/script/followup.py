"""Simulates a script, and then what is asked next: what the best remedy saves, and how large a batch fits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from actbench.errors import MeasurementError
from actbench.model.measured import Advised, Measurement
from actbench.model.records import Failure
from actbench.report.advice import needed_bytes
from actbench.tools.script import bench
from actbench.tools.script.answer import WORTH_SECONDS
from actbench.tools.script.bench import failure_of as failure_of  # a bench has it
from actbench.tools.script.suggestions import suggestions
from actbench.tools.script.trials import Finish, forked, largest_batch

__all__ = ["Session", "failure_of"]

_SEARCHES: Final = 3
"""Simulations of a usual search for the largest batch: half or double the script's own, the predicted, the next."""

_TRIES: Final = 2
"""Schemes that are tried where the first one cannot be simulated."""


class Session(bench.Session):
    """A script whose measurement also has ``advised``, as far as that is known in a short time."""

    def memory(self) -> Measurement:
        """Run the script, and run it again with the best remedy and with other batches, each in its own process."""
        found = super().memory()
        if self.case.meter != "simulated" or self.case.scheme != "exact" or self.script.whole:
            return found
        advised = Advised(is_slow=self.seconds > WORTH_SECONDS)
        if not advised.is_slow:
            advised = self._remedied(found, advised)
        if _SEARCHES * self.seconds <= WORTH_SECONDS and not self.case.find_largest_batch:
            advised = advised.model_copy(update={"largest_batch": self._largest_batch(found)})
        return found.model_copy(update={"advised": advised})

    def _remedied(self, found: Measurement, advised: Advised) -> Advised:
        """Return the advice with the numbers of the first scheme worth trying that can be simulated."""
        for each in suggestions(found)[:_TRIES]:
            self.said(f"with {each.scheme}")
            other = bench.Session(self.case.model_copy(update={"scheme": each.scheme}), timeline=False)
            simulated = forked(_silent(other.run_as_it_is))
            if isinstance(simulated, Failure) or needed_bytes(simulated) >= needed_bytes(found):
                continue
            return advised.model_copy(
                update={
                    "scheme": each.scheme,
                    "needed_bytes": needed_bytes(simulated),
                    "over_limit_bytes": simulated.over_limit_bytes,
                    "step_seconds": simulated.estimated.step_seconds if simulated.estimated else None,
                }
            )
        return advised

    def _largest_batch(self, found: Measurement) -> int | None:
        """Return the largest batch that fits; None where the script has no loader of batches, or in too long a time."""
        began = time.monotonic()
        limit, has_loader = found.memory_limit_bytes, found.built is not None and found.built.batch_size is not None
        if limit is None or not has_loader:
            return None

        def told(batch: int, fits: bool) -> None:
            self.tried(batch, fits)
            if time.monotonic() > began + 2 * WORTH_SECONDS:
                raise MeasurementError("the search takes long")

        try:
            return largest_batch(
                lambda batch, finish: _silent(partial(self._trial, batch))(finish), found, limit, told
            ).batch_size
        except MeasurementError:  # as where the data has no batch of that size
            return None


def _silent(run: Callable[[Finish], Measurement]) -> Callable[[Finish], Measurement]:
    """Return what runs a script in a process of its own, and lets it print nothing: it printed the same before."""

    def ran(finish: Finish) -> Measurement:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        return run(finish)

    return ran
