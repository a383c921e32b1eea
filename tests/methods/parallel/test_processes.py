"""Real processes that share a model out train what one process trains on all their rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = ("ddp:{}", "zero1:{}", "fsdp:{}", "fsdp1:{}")
STACKED = (
    "fsdp:{},cpu_offload=true",
    "zero2:{}",
    "checkpoint,blocks=Block+fsdp:{}",
    "checkpoint,blocks=Block+fsdp1:{},prefetch=none",
    "accumulate:2+fsdp1:{}",
    "fsdp1:{},adapters=apart",
    "accumulate:2+fsdp1:{},adapters=whole",
    "accumulate:2+ddp:{}",
    "ddp:{},bucket_view=false",
)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(("count", "specs"), [(2, (*PLAIN, *STACKED)), (3, PLAIN)])
def test_processes_train_what_one_trains_on_all_their_rows(count: int, specs: tuple[str, ...]) -> None:
    program = Path(__file__).with_name("processes.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]

    done = subprocess.run([*launch, program, *(spec.format(count) for spec in specs)], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
