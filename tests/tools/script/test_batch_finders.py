from __future__ import annotations

import torch
from accelerate.utils import find_executable_batch_size

from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation
from actbench.units import MIB


def test_accelerate_finds_the_batch_that_fits() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        torch.empty(batch_size, MIB // 4, device="cuda")
        return batch_size

    with Simulation(profiles.get("rtx-4090"), memory_limit_bytes=40 * MIB, raise_oom=True):
        found = train()

    assert tried == sorted(tried, reverse=True)
    assert tried[0] == 64
    assert found == tried[-1] <= 40 < tried[-2]
