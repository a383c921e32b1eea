"""One of several processes that share layers; started by ``conftest.py``, which reads what the first one writes.

It is given a file of jobs and the file of results. A job is a model, a specification, and either what its gradients are
compared with in one process alone, with how many passes they are the mean of, or a word that the model drops something.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ActbenchError
from actbench.model.records import Case
from actbench.scheme.conditions import Processes
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator.overrides import without_dropout

STEPS = 3


def run(job: dict[str, Any], axes: dict[str, int]) -> dict[str, Any]:
    case = Case(model=job["model"], batch_size=2, sequence_length=job.get("tokens", 16))
    workload = workloads.load_workload(case)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    batch = workload.batch(case.batch_size, seed=mesh.get_local_rank("dp") if "dp" in axes else 0)
    setup = replace(workload.setup(materialize=True, seed=0), processes=Processes(mesh))
    torch.manual_seed(0)
    try:
        mine = schemes.build(job["spec"]).apply(setup)
    except ActbenchError as error:
        return {"refused": str(error)}
    if job.get("dropping"):
        losses, gradients = trained(mine, batch, 2, 1)
        return {"losses": everyone([losses]), "apart": apart(gradients)}
    torch.manual_seed(0)
    alone = schemes.build(job["alone"]).apply(workload.setup(materialize=True, seed=0))
    passes = job.get("passes", 1)
    steps = 1 if passes > 1 or "dp" in axes else STEPS
    with without_dropout(mine.module), without_dropout(alone.module):
        losses, gradients = trained(mine, batch, steps, passes)
        expected, exact = trained(alone, batch, steps, 1)
    if "dp" in axes:
        for gradient in exact.values():
            distributed.all_reduce(gradient.div_(axes["dp"]), group=mesh.get_group("dp"))
    found = {"losses": losses, "expected": expected, "errors": errors(gradients, exact, mesh["tp"])}
    return {**found, "apart": apart(gradients)}


def trained(setup: TrainingSetup, batch: Batch, steps: int, passes: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of each step, and the mean gradients of some passes of the last."""
    setup = replace(setup, make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    torch.manual_seed(1)
    step, losses = TrainStep(setup, batch), list[float]()
    for number in range(steps):
        if number:
            step.update()
        for _ in range(passes):
            step.backward(step.forward())
        losses.append(float(step.loss))  # of all micro-batches
    found = {name: p.grad for name, p in setup.module.named_parameters() if p.grad is not None}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}
    return losses, {name: grad / passes for name, grad in whole.items()}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, float]:
    """Return the relative error of the gradient of each parameter, the worst of all processes."""
    size, rank = mesh.size(), mesh.get_local_rank()
    mine: dict[str, float] = {}
    for name, whole in exact.items():
        if name not in found:  # a bias that the first process adds alone
            assert rank
            assert name.endswith(".bias")
            continue
        cut = [dim for dim in range(whole.dim()) if found[name].shape[dim] != whole.shape[dim]]
        if cut:
            blocks = whole.chunk(3 if "c_attn" in name else 1, cut[0])
            whole = torch.cat([block.chunk(size, cut[0])[rank] for block in blocks], cut[0])
        if whole.norm() > 1e-6:  # the bias of keys has no gradient but noise
            mine[name] = float((found[name] - whole).norm() / whole.norm())
    assert mine
    worst: dict[str, float] = {}
    for each in everyone([mine]):
        worst.update({name: max(error, worst.get(name, 0.0)) for name, error in each.items()})
    return worst


def apart(gradients: dict[str, Tensor]) -> list[str]:
    """Return the names of the gradients that all processes have as a whole, and not alike to the bit."""
    known = set.intersection(*(set(names) for names in everyone([list(gradients)])))
    copies = everyone([{name: gradients[name] for name in sorted(known) if name.endswith(WHOLE)}])
    return [name for name in copies[0] if not all(torch.equal(each[name], copies[0][name]) for each in copies)]


WHOLE = ("norm.weight", "LayerNorm.weight", "LayerNorm.bias", "ln_1.weight", "ln_2.bias", "ln_f.weight", "wpe.weight")


def everyone(mine: list[Any]) -> list[Any]:
    """Return what all processes give."""
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, mine)
    return [each[0] for each in gathered]


def main(jobs: Path, results: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{results}.store", rank=RANK, world_size=WORLD)
    found = []
    for job in json.loads(jobs.read_text()):
        print(job, file=sys.stderr, flush=True)
        found.append(run(job, job.get("axes", {"tp": WORLD})))
    if RANK == 0:
        results.write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    main(Path(sys.argv[1]), Path(sys.argv[2]))
