"""Simulates a case, or measures its gradient, and tells what each block of the model holds and takes."""

from __future__ import annotations

from actbench import scheme as schemes
from actbench.measuring import bench
from actbench.measuring.failures import failure_of as failure_of  # a bench has it
from actbench.model.records import Case
from actbench.scheme.facets import Spread
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import blockmarks
from actbench.simulator.simulated import SimulatedMeter


class Session(bench.Session):
    """A case whose measurement also has ``blocks``, if its model has any and its meter simulates.

    What does nothing is refused. Sites have no bytes: what the exact model saves there is not looked into, unless
    several processes train together.
    """

    def __init__(self, case: Case) -> None:
        self._inspects = schemes.build(case.scheme).facet(Spread) is not None
        super().__init__(case)
        if self.scheme.changes and not self._inspects:
            self._refuse_idle()

    def time(self, steps: int) -> None:
        """Nothing is timed: what is measured for real here is the error of the gradient."""

    def _exact(self) -> TrainingSetup:
        exact = super()._exact()
        if isinstance(self.meter, SimulatedMeter):
            self.meter.blocks = blockmarks.found(exact.module)  # before schemes, which replace parts of blocks
        return exact

    def _refuse_idle(self) -> None:
        seen = self._trace(self.setup)
        if seen is not None:
            self._inspect(seen, seen)
            self.sites = self.setup.sites  # what the exact model saves there is not known
