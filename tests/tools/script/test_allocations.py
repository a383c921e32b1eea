from __future__ import annotations

import gc

import pytest
import torch

from actbench.tools.script.allocations import Allocations
from actbench.tools.script.steps.counting import Step


@pytest.mark.parametrize("script_collects", [True, False])
def test_a_script_keeps_its_choice_of_collecting_garbage(script_collects: bool) -> None:
    allocations = Allocations(list)
    was_enabled = gc.isenabled()
    try:
        (gc.enable if script_collects else gc.disable)()
        allocations.start()
        step = Step(begun=allocations.now())
        step.updating = step.begun
        held = torch.ones(1024)
        allocations.end(step)
        assert not gc.isenabled(), "nothing may be freed that the trace does not see"
        allocations.begin()
        assert gc.isenabled() == script_collects
        allocations.stop()
        assert gc.isenabled() == script_collects
        assert held.numel() == 1024
    finally:
        (gc.enable if was_enabled else gc.disable)()
