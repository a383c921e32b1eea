"""Scripts as the first of several processes, with a card each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from residual import ROWS, Block, Residual, batch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from actbench.model.measured import Measurement
from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation

CARD = "h100-80gb"
PROCESSES = 4
MODEL = Path(__file__).parent / "residual.py"


def on_card(processes: int = PROCESSES) -> Simulation:
    return Simulation(profiles.get(CARD), processes=processes, folder=MODEL.parent)


def trained(
    wrap: Callable[[nn.Module], nn.Module], processes: int = PROCESSES, foreach: bool | None = None
) -> Measurement:
    """Return what a step of a loop over a wrapped model needs."""
    with on_card(processes) as card:
        distributed.init_process_group("nccl")
        model = wrap(Residual())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        for _ in range(8):
            given = batch(ROWS, "cuda")
            loss = F.cross_entropy(model(given["x"]), given["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return card.measurement


def fsdp2(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        for block in [part for part in model.modules() if isinstance(part, Block)]:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return wrap


def ddp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model.cuda(), device_ids=[0], **options)
