"""Simulates a case, or measures its gradient, and tells what each block of the model holds and takes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Hashable

from actbench import plugins, scheme as schemes
from actbench.device.card import cached_answers
from actbench.measuring import bench
from actbench.measuring.failures import failure_of as failure_of  # a bench has it
from actbench.measuring.inspection.recorder import RunningModules
from actbench.measuring.inspection.sites import Trace, inspect
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.packing import savedtensors
from actbench.scheme.facets import Spread
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import blockmarks
from actbench.simulator.cachingmode import starting_from
from actbench.simulator.sharedopcache import SharedOpCache
from actbench.simulator.simulated import SimulatedMeter
from actbench.workload.names import presets

_shared: SharedOpCache | None = None
"""Recipes that the cases of a fit share; None in a process that no fork server has started."""


def before_forks() -> None:
    """Make the file in which the processes that are forked from this one share recipes; it ends with them.

    Read, too, what each of them would read for 60 ms: presets, and the entry points of installed packages.
    """
    global _shared
    with tempfile.TemporaryFile() as file:
        _shared = SharedOpCache(os.dup(file.fileno()))
    presets()
    plugins.installed("workloads")
    schemes.build("exact")


def before_fork() -> None:
    """Read recipes that were added, and look through libraries, so that the process that is forked next need not."""
    cached_answers(len(sys.modules))
    if _shared is not None:
        _shared.refresh()


class Session(bench.Session):
    """A case whose measurement also has ``blocks``, if its model has any and its meter simulates.

    A scheme that changes nothing is refused. Sites have no bytes, because what the exact model saves there is traced
    only if several processes train together.
    """

    def __init__(self, case: Case) -> None:
        self._inspects = schemes.build(case.scheme).facet(Spread) is not None
        key = f"{case.device_profile} {case.torch_era} {case.workspaces}"
        self._recipes = None if _shared is None else _shared.load(key)
        with starting_from({} if self._recipes is None else self._recipes.known):
            super().__init__(case)

    def memory(self) -> Measurement:
        """Read the step; an error if the scheme turns out to change nothing while the step runs."""
        try:
            measured = self._seen()
        finally:
            if self._recipes is not None:
                self._recipes.publish()
        trace = self.meter.trace if isinstance(self.meter, SimulatedMeter) else None  # plans are joined from it
        return measured if trace is None else measured.model_copy(update={"trace": trace.packed()})

    def _seen(self) -> Measurement:
        if not self.scheme.changes or self._inspects:
            return super().memory()
        paths = {site.path for site in self.setup.sites}
        modules, acted = RunningModules(self.setup.module, paths=paths), set[tuple[str, Hashable]]()
        with modules.watching(), savedtensors.observing(lambda by: acted.add((modules.running, by))):
            measured = super().memory()
        # What modules save is not known, and so sites have no bytes.
        _, unreached = inspect(Trace((), modules.calls), Trace((), modules.calls, acted), self.setup)
        return measured.model_copy(update={"unreached": unreached})

    def time(self, steps: int) -> None:
        """Time nothing: only the error of the gradient is measured for real here."""

    def _exact(self) -> TrainingSetup:
        exact = super()._exact()
        if isinstance(self.meter, SimulatedMeter):
            self.meter.blocks = blockmarks.found(exact.module)  # before schemes, which replace parts of blocks
        return exact
