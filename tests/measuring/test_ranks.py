"""Whoever has started processes and joined them measures in them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from actbench import scheme as schemes
from actbench.measuring import meters
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.processgroup import ALONE
from actbench.measuring.ranks import Ranks, process_group_of
from actbench.model.records import Case

SIMULATED = Case(model="tiny-gpt2", scheme="ddp:2", batch_size=1, meter="simulated")


@pytest.mark.slow
def test_processes_of_ones_own_measure_a_case_together() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    done = subprocess.run([*launch, Path(__file__).with_name("processes.py")], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_a_group_of_ones_own_measures_what_needs_several_processes(tmp_path: Path) -> None:
    ddp, exact, meter = schemes.build("ddp:2"), schemes.build("exact"), CpuMeter()
    assert process_group_of(ddp, meter) is ALONE

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert isinstance(process_group_of(ddp, meter), Ranks)
        assert process_group_of(exact, meter) is ALONE
        assert process_group_of(ddp, meters.open_meter(SIMULATED)) is ALONE
    finally:
        distributed.destroy_process_group()


def test_gradients_of_flat_parameters_are_joined_beside_names_that_torch_has(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    layer = nn.Linear(3, 2)
    layer._handle = 3
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        alone: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD, "device_id": torch.device("cpu")}
        with warnings.catch_warnings(action="ignore"):  # torch would have one process use DDP
            flat = FullyShardedDataParallel(nn.Sequential(layer), use_orig_params=True, **alone)
        gradients = {each: torch.full_like(each, 4) for each in flat.parameters()}
        whole = Ranks().whole(gradients, flat)
    finally:
        distributed.destroy_process_group()

    assert whole is not None
    assert {name: tuple(value.shape) for name, value in whole.items()} == {"0.weight": (2, 3), "0.bias": (2,)}
