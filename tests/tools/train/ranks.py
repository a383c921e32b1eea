"""One of several processes that train runs together; started by ``conftest.py``, which reads what the first one writes.

It is given a file of jobs: a case, the strategy, and where a run is stopped to be resumed; and the file of results.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from actbench.errors import ActbenchError
from actbench.measuring import bench
from actbench.tools.train import launch
from actbench.tools.train.checkpoint import CheckpointFolder
from actbench.tools.train.loop import TrainingLoop
from actbench.tools.train.processes import ProcessGroup, joined
from actbench.tools.train.records import TrainingCase


def run(job: dict[str, Any], group: ProcessGroup, folder: Path) -> dict[str, Any]:
    group = replace(group, launch=replace(group.launch, strategy=job["strategy"]))
    case = TrainingCase(**job["case"], processes=group.size, strategy=job["strategy"])
    loop = TrainingLoop(case, group)
    if "stop" in job:
        for _ in loop:
            if loop.done == job["stop"]:
                break
        loop.save(CheckpointFolder(folder))
        torch.manual_seed(1234)  # whatever else happened in between
        loop = TrainingLoop(case, group)
        loop.resume(CheckpointFolder(folder))
    list(loop)
    shares = [p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in loop._setup.module.parameters()]
    weights = [
        loop._step.parallel.full_tensor(p.detach()).double().sum().item() for p in loop._setup.module.parameters()
    ]
    found = loop.result().model_dump(mode="json")
    return {**found, "shares": group.all_gather(sum(shares)), "weights": group.all_gather(weights)}


def tried(job: dict[str, Any], group: ProcessGroup, folder: Path) -> dict[str, Any]:
    try:
        return run(job, group, folder)
    except (ActbenchError, RuntimeError) as error:
        return bench.failure_of(error).model_dump(mode="json")


def main(jobs: Path, results: Path) -> None:
    torch.set_num_threads(1)
    with joined(launch.read(os.environ)) as group:
        found = [
            tried(job, group, results.with_name(f"checkpoint-{place}"))
            for place, job in enumerate(json.loads(jobs.read_text()))
        ]
        if group.is_first:
            results.write_text(json.dumps(found))
        distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
