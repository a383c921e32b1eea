"""Hundreds of steps leave nothing behind, for every scheme of the registry: no tensors, memory, files or threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from actbench import scheme as schemes, workload as workloads
from actbench.model.records import Case
from actbench.scheme.setup import Batch, TrainingSetup, TrainStep

CASE = Case(model="tiny-gpt2", batch_size=2, sequence_length=16, optimizer="adamw")
"""For schemes that find nothing in a plain network; its steps take ten times as long."""
EXAMPLES = {
    "compile": "compile:0.5,backend=aot_eager_decomp_partition",
    "encode": "encode:int:6",
    "fewbit": "fewbit:3",
    "galore": "galore:8",
    "fira": "fira:8",
    "apollo": "apollo:8",
    "randomized": "randomized:0.5",
}
MODELS = {"liger": "tiny-llama", "chunked_loss": "tiny-gpt2"}
SPECS = [EXAMPLES.get(name, name) for name in schemes.alone() if name != "channels_last"]
SETTLED, STEPS = 100, 300
"""Steps after which caches are full, such as allocations of bits, and steps in all."""

FEW_BYTES = 4 * 1024**2
"""Bytes by which the process may grow: 20 KiB a step, less than what one step packs."""


class Block(nn.Module):
    """Norms, linear layers and activations of several kinds, in few operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act, self.gate = nn.GELU(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.gate(self.act(self.up(self.norm(x)))))
        return result


def plain() -> tuple[TrainingSetup, Callable[[int], Batch]]:
    """Return a network's setup, and its batches by number."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        result: Tensor = (module(batch["x"]) - batch["x"]).square().mean()
        return result

    setup = TrainingSetup(
        nn.Sequential(Block(), Block(), nn.Linear(32, 32)),
        loss=loss,
        make_optimizer=lambda module: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]),
    )
    return setup, lambda number: {"x": torch.randn(64, 32, generator=torch.Generator().manual_seed(number))}


def of_a_model(name: str) -> tuple[TrainingSetup, Callable[[int], Batch]]:
    """Return the same of a shipped model."""
    case = CASE.model_copy(update={"model": name})
    workload = workloads.load_workload(case)
    return workload.setup(materialize=True, seed=0), lambda number: workload.batch(case.batch_size, seed=number)


class Held(NamedTuple):
    """What a process has: objects and tensors of Python, bytes of memory, open files and threads."""

    objects: int
    tensors: int
    tensor_bytes: int
    memory_bytes: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        """Return what there is after Python's collector ran."""
        gc.collect()
        found = gc.get_objects()
        tensors = [each for each in found if isinstance(each, torch.Tensor) and not each.is_meta]
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        return cls(len(found), len(tensors), sum(each.nbytes for each in tensors), resident, files, threads)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system tells its processes nothing")
@pytest.mark.sampled(fast=0, slow=4)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("spec", SPECS)
def test_steps_leave_nothing_behind(spec: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        setup, batch = of_a_model(MODELS[spec]) if spec in MODELS else plain()
        step = TrainStep(schemes.build(spec).apply(setup))
        held = []
        for number in range(1, STEPS + 1):
            step.batch = batch(number)
            step()
            if number in (SETTLED, STEPS):
                held.append(Held.now())

    before, after = held
    assert (after.tensors, after.tensor_bytes) == (before.tensors, before.tensor_bytes)
    assert (after.files, after.threads) == (before.files, before.threads)
    assert after.objects - before.objects < (STEPS - SETTLED) / 2  # less than one for two steps
    assert after.memory_bytes - before.memory_bytes <= FEW_BYTES
