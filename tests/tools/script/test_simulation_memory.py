"""Tensors and modules believe that they are on the simulated card, and torch knows the card's memory."""

from __future__ import annotations

import gc

import pytest
import torch
from mlptraining import FLOAT, WEIGHTS, WIDTH, model
from torch import nn

import actbench
from actbench.model.context import CONTEXT_BYTES
from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation
from actbench.units import MIB


def test_tensors_say_where_they_are() -> None:
    with Simulation(profiles.get("rtx-4090")):
        host, card = torch.zeros(3), torch.zeros(3, device="cuda")
        large = torch.zeros(1000, 1000)
        moved = large.cuda()
        back = moved.cpu()

        assert (host.device.type, large.device.type, back.device.type) == ("cpu", "cpu", "cpu")
        assert card.device == moved.device == torch.device("cuda", 0)
        assert (card + 1).device.type == "cuda"
        assert (moved.is_cuda, moved.is_cpu, moved.get_device()) == (True, False, 0)
        assert (large.is_cuda, large.is_cpu, large.get_device()) == (False, True, -1)
        assert torch.zeros_like(moved).is_cuda
        assert moved.new_zeros(3).is_cuda
        assert torch.arange(4, device=moved.device).tolist() == [0, 1, 2, 3]
        assert card.type() == "torch.cuda.FloatTensor"


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(
    "to_card",
    [
        lambda x: x.cuda(),
        lambda x: x.to("cuda"),
        lambda x: x.to("cuda:0", non_blocking=True),
        lambda x: x.to(torch.device("cuda"), torch.float32),
        lambda x: x.to(device="cuda", dtype=torch.float32, copy=True),
        lambda x: x.to(0),
        lambda x: x.type_as(torch.empty(1, device="cuda")),
        lambda x: x.to(torch.empty(1, device="cuda")),
        lambda x: torch.empty_like(x, device="cuda").copy_(x),
    ],
)
def test_what_is_moved_to_the_card_is_counted_there(to_card) -> None:  # type: ignore[no-untyped-def]
    with Simulation(profiles.get("rtx-4090")):
        x = torch.zeros(1000, 1024)
        assert torch.cuda.memory_allocated() == 0

        moved = to_card(x)
        gc.collect()

        assert torch.cuda.memory_allocated() == moved.nbytes
        assert moved.to("cuda") is moved
        del moved
        assert torch.cuda.memory_allocated() == 0


def test_the_numbers_of_the_card_are_the_simulated_ones() -> None:
    with Simulation(profiles.get("rtx-4090")):
        x = torch.zeros(10 * MIB // FLOAT, device="cuda")
        y = torch.zeros(30 * MIB // FLOAT, device="cuda")
        del y

        assert torch.cuda.memory_allocated() == x.nbytes
        assert torch.cuda.max_memory_allocated() == 40 * MIB
        assert torch.cuda.memory_reserved() == 40 * MIB
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == x.nbytes
        assert torch.cuda.memory_reserved() == 10 * MIB
        free, total = torch.cuda.mem_get_info()
        assert total - free == 10 * MIB + CONTEXT_BYTES
        assert "10240 KiB" in torch.cuda.memory_summary()


def test_modules_moved_after_their_optimizer_was_made_stay_its_own() -> None:
    with Simulation(profiles.get("rtx-4090")):
        module = model()
        optimizer = torch.optim.SGD(module.parameters())
        module.cuda()

        assert all(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
        assert torch.cuda.memory_allocated() == WEIGHTS


@pytest.mark.slow
def test_tied_parameters_stay_tied() -> None:
    with Simulation(profiles.get("rtx-4090")):
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        shared = nn.Parameter(torch.zeros(4))
        first.extra, second.extra = shared, shared

        assert second.weight is first.weight
        assert second.extra is first.extra
        assert nn.ModuleList([first, second]).cuda()[1].weight is first.weight


def test_memory_runs_out_where_it_would() -> None:
    """A script that tries again with half of its batch finds the batch that fits."""
    tried = []
    with actbench.simulate("rtx-4090", memory_limit_bytes=64 * MIB, raise_oom=True) as card:
        module = model().cuda()
        optimizer = torch.optim.SGD(module.parameters())
        rows = 2**16
        while True:
            try:
                for _ in range(9):
                    module(torch.randn(rows, WIDTH, device="cuda")).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except torch.OutOfMemoryError as error:
                tried.append((rows, str(error)))
                optimizer.zero_grad()
                rows //= 2

    assert tried[0][0] == 2**16
    assert "rtx-4090" in tried[0][1]
    assert rows == tried[-1][0] // 2
    assert card.measurement.fits
