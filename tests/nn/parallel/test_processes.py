"""Real processes that share a model out train what one process trains on all their rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SPECS = ["ddp", "zero1", "fsdp", "fsdp,reshard=false", "checkpoint,blocks=Block+fsdp", "accumulate:2+ddp"]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [2, 3])
def test_processes_train_what_one_trains_on_all_their_rows(spec: str, count: int) -> None:
    name, comma, keys = spec.rpartition("+")[2].partition(",")
    stack = f"{spec.rpartition('+')[0]}+" if "+" in spec else ""
    program = Path(__file__).with_name("processes.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]

    done = subprocess.run([*launch, program, f"{stack}{name}:{count}{comma}{keys}"], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
