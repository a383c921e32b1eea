"""One of several processes that step one optimizer together; started by ``test_shards.py``, which reads the results.

It is given the number of its job, whose settings are in JSON, and a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actbench import optim
from actbench.errors import ActbenchError

KINDS = {
    "AdamW": lambda held, **options: optim.AdamW(held, lr=1e-2, **options),
    "SGD": lambda held, **options: optim.SGD(held, lr=1e-2, momentum=0.9, **options),
}


class Weights(nn.Module):
    """Parameters whose gradients are given, so that no order of sums is in what is compared."""

    def __init__(self, shapes: list[list[int]], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        self.weights = nn.ParameterList([nn.Parameter(values) for values in drawn])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor


def own(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this process has of a parameter, as a DTensor."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def run(model: Weights, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = own(drawn, parameter)
        optimizer.step()


def made(job: dict[str, Any], world: int) -> tuple[Weights, torch.optim.Optimizer]:
    model = Weights(job["shapes"], getattr(torch, job.get("dtype", "float32")))
    if not job.get("plain"):
        mesh = init_device_mesh("cpu", (world,))
        if job.get("replicas"):
            mesh = init_device_mesh("cpu", (job["replicas"], world // job["replicas"]), mesh_dim_names=("r", "s"))
        fully_shard(model, mesh=mesh)
    return model, KINDS[job["kind"]](model.parameters(), encoding=job["encoding"], seed=5)


def worked(job: dict[str, Any], folder: Path, world: int) -> dict[str, Any]:
    model, optimizer = made(job, world)
    options = StateDictOptions(**job.get("options", {}))
    if "load" in job:
        state = get_optimizer_state_dict(model, optimizer, options=options)
        weights = {"weights": model.state_dict()}
        checkpoint.load({"optimizer": state, **weights}, checkpoint_id=folder / job["load"])
        model.load_state_dict(weights["weights"])
        set_optimizer_state_dict(model, optimizer, state, options=options)
    if "take" in job:  # a whole state, as one process has it
        set_optimizer_state_dict(
            model,
            optimizer,
            torch.load(folder / job["take"]),
            options=StateDictOptions(full_state_dict=True),
        )
    if "again" in job:  # what each process holds, as it lies
        run(model, optimizer, 0, job["again"])
        held = optimizer.local_state_dict()
        optimizer = KINDS[job["kind"]](model.parameters(), encoding="bf16")
        optimizer.load_state_dict(held)
    run(model, optimizer, *job["steps"])
    if "save" in job:
        state = get_optimizer_state_dict(model, optimizer, options=options)
        checkpoint.save({"optimizer": state, "weights": model.state_dict()}, checkpoint_id=folder / job["save"])
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if "torch" in job:
        torch.save(full, folder / job["torch"])
    return {
        "weights": {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()},
        "state": full,
        "held": {
            name: {key: value for key, value in optimizer.state[parameter].items() if value.dtype == torch.uint8}
            for name, parameter in model.named_parameters()
        },
    }


def main(jobs: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    meet = f"file://{jobs.with_suffix('.meet')}"
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    for number, job in enumerate(json.loads(jobs.read_text())):
        try:
            found = worked(job, jobs.parent, world)
        except ActbenchError as error:
            found = {"error": str(error)}
        torch.save(found, jobs.with_suffix(f".{number}.{rank}.pt"))
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
