"""The simulated meter, as the entry point names it."""

from __future__ import annotations

from typing import Final

from actbench.measuring.meters.meter import MeterKind
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

SIMULATED: Final = MeterKind(lambda case: SimulatedMeter(profiles.of_case(case), case.memory_limit_bytes))
