"""Simulates a case, or measures its gradient, and tells what each block of the model holds and takes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable

from actbench import scheme as schemes
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
from actbench.simulator.recalled import beginning_with
from actbench.simulator.sharedrecipes import SharedRecipes
from actbench.simulator.simulated import SimulatedMeter

with tempfile.TemporaryFile() as _file:
    _RECIPES = SharedRecipes(os.dup(_file.fileno()))
"""Recipes that the cases of a fit share: their processes are forked from the one that imports this module."""


class Session(bench.Session):
    """A case whose measurement also has ``blocks``, if its model has any and its meter simulates.

    A scheme that changes nothing is refused. Sites have no bytes, because what the exact model saves there is traced
    only if several processes train together.
    """

    def __init__(self, case: Case) -> None:
        self._inspects = schemes.build(case.scheme).facet(Spread) is not None
        self._recipes = _RECIPES.take(f"{case.device_profile} {case.torch_era} {case.workspaces}")
        with beginning_with(self._recipes.known):
            super().__init__(case)

    def memory(self) -> Measurement:
        """Read the step; an error if the scheme turns out to change nothing while the step runs."""
        try:
            return self._seen()
        finally:
            self._recipes.give()

    def _seen(self) -> Measurement:
        if not self.scheme.changes or self._inspects:
            return super().memory()
        paths = {site.path for site in self.setup.sites}
        modules, acted = RunningModules(self.setup.module, paths=paths), set[tuple[str, Hashable]]()
        with modules.watching(), savedtensors.listening(lambda by: acted.add((modules.running, by))):
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
