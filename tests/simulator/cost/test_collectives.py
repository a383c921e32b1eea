"""What one process of many sends in a step, to the byte, under torch's fake process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import all_reduce, all_to_all_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from actbench.model.records import Phase
from actbench.simulator import profiles
from actbench.simulator.cost.clock import communication, estimate
from actbench.simulator.cost.collectives import Collective, CollectiveKind
from actbench.simulator.cost.recorder import Done, Recorder
from actbench.simulator.fake import fake_mode
from actbench.simulator.tracker import StorageTracker

F32 = 4
all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # its name in torch 2.11


@pytest.fixture
def mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """Return a function that pretends that this process is the first of a mesh."""

    def make(*sizes: int) -> DeviceMesh:
        distributed.init_process_group("fake", rank=0, world_size=math.prod(sizes), store=FakeStore())
        return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])

    yield make
    if distributed.is_initialized():
        distributed.destroy_process_group()


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


def done_in(model: nn.Module, x: Tensor, *, steps: int = 1) -> Sequence[Done]:
    """Return what the last of some steps of a model does; to be called within a fake mode."""
    phase: list[Phase] = ["forward"]
    recorder = Recorder(lambda: phase[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StorageTracker(observe=recorder.note):
        for _ in range(steps):
            recorder.begin()
            phase[0] = "forward"
            loss = model(x).sum()
            phase[0] = "backward"
            loss.backward()
            phase[0] = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
    return recorder.done


def sent(done: Sequence[Done]) -> dict[str, tuple[int, int]]:
    """Return how often each kind of collective is called, and what one process sends by it."""
    return {each.kind: (each.calls, each.sent_bytes) for each in communication(done) or ()}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    ("ranks", "blocks", "width", "reshard"),
    [(2, 1, 64, True), (8, 3, 128, True), (64, 3, 64, False), (8, 1, 128, False)],
)
def test_fsdp_gathers_blocks_twice_and_the_root_once_and_scatters_all(
    mesh: Callable[..., DeviceMesh], ranks: int, blocks: int, width: int, reshard: bool
) -> None:
    processes = mesh(ranks)
    with fake_mode():
        model = nn.Sequential(*(block(width) for _ in range(blocks)), nn.Linear(width, 64))
        inner = sum(p.numel() for child in list(model)[:blocks] for p in child.parameters())
        whole = sum(p.numel() for p in model.parameters())
        for child in list(model)[:blocks]:
            fully_shard(child, mesh=processes, reshard_after_forward=reshard)
        fully_shard(model, mesh=processes)
        found = sent(done_in(model, torch.randn(4, width), steps=2))

    again = inner if reshard else 0
    assert found == {
        "all-gather": (blocks * (1 + reshard) + 1, F32 * (whole + again) * (ranks - 1) // ranks),
        "reduce-scatter": (blocks + 1, F32 * whole * (ranks - 1) // ranks),
    }


def test_fsdp_in_bfloat16_gathers_half_of_the_bytes(mesh: Callable[..., DeviceMesh]) -> None:
    processes = mesh(8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_mode():
        model = block(64)
        fully_shard(model, mesh=processes, mp_policy=policy)
        found = sent(done_in(model, torch.randn(4, 64), steps=2))
        whole = sum(p.numel() for p in block(64).parameters())

    assert found == {"all-gather": (1, 2 * whole * 7 // 8), "reduce-scatter": (1, 4 * whole * 7 // 8)}


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("width", [64, 256])
def test_ddp_sends_its_gradients_twice_around(mesh: Callable[..., DeviceMesh], ranks: int, width: int) -> None:
    mesh(ranks)
    with fake_mode():
        model = DistributedDataParallel(block(width), init_sync=False)
        model.register_comm_hook(None, lambda _, bucket: _summed(bucket.buffer()))
        whole = sum(p.numel() for p in model.parameters())
        found = sent(done_in(model, torch.randn(4, width)))

    assert found == {"all-reduce": (1, 2 * F32 * whole * (ranks - 1) // ranks)}


def _summed(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Do what DDP does without a hook, but for the division; the fake group's own future holds nothing."""
    distributed.all_reduce(buffer, async_op=True)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("sizes", "blocks"), [((1, 2), 1), ((2, 4), 3), ((1, 8), 2)])
def test_tensor_parallel_blocks_add_up_activations_and_wait_for_them(
    mesh: Callable[..., DeviceMesh], sizes: tuple[int, int], blocks: int
) -> None:
    width, rows, ranks = 64, 2**18, sizes[1]
    processes = mesh(*sizes)["tp"]
    with fake_mode():
        model = nn.Sequential(*(block(width) for _ in range(blocks)))
        for child in model:
            parallelize_module(child, processes, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        done = done_in(model, torch.randn(rows, width), steps=2)

    activations = 2 * F32 * rows * width * (ranks - 1) // ranks
    calls = 2 * blocks - 1  # nobody wants the gradient of the input
    assert sent(done) == {"all-reduce": (calls, calls * activations)}
    device = profiles.get("h100-80gb")
    assert device.rates is not None
    on_card = [each._replace(on_host=False) for each in done]
    time = estimate(on_card, device.rates, device.efficiencies)
    assert time.exposed_seconds == pytest.approx(time.communication_seconds, rel=1e-6)


def test_groups_of_other_sizes_are_told_apart_though_the_tensors_are_alike(mesh: Callable[..., DeviceMesh]) -> None:
    processes = mesh(2, 4)
    recorder = Recorder(lambda: "forward")
    with fake_mode(), StorageTracker(observe=recorder.note):
        recorder.begin()
        x = torch.empty(40, 3)
        for group in (processes["dp"], processes["tp"]):
            all_reduce(x, "sum", group).sum()
            all_gather(x, 0, group).sum()
            all_to_all_single(x, None, None, group).sum()

    total = F32 * 120
    assert [each.work.collective for each in recorder.done if each.work.collective] == [
        Collective("all-reduce", total, (0, 4)),
        Collective("all-gather", 2 * total, (0, 4)),
        Collective("all-to-all", total, (0, 4)),
        Collective("all-reduce", total, (0, 1, 2, 3)),
        Collective("all-gather", 4 * total, (0, 1, 2, 3)),
        Collective("all-to-all", total, (0, 1, 2, 3)),
    ]


@pytest.mark.parametrize(
    ("run", "kind", "elements"),
    [
        (lambda x: distributed.broadcast(x, src=0), "broadcast", 24),
        (lambda x: distributed.send(x, dst=1), "send", 24),
        (lambda x: distributed.recv(x, src=1), "receive", 24),
        (lambda x: distributed.reduce(x, dst=0), "reduce", 24),
        (lambda x: distributed.all_reduce(x), "all-reduce", 24),
        (lambda x: distributed.all_gather([torch.empty_like(x) for _ in range(4)], x), "all-gather", 96),
        (lambda x: distributed.all_gather_into_tensor(torch.empty(96), x), "all-gather", 96),
        (lambda x: distributed.reduce_scatter_tensor(torch.empty(6), x), "reduce-scatter", 24),
        (lambda x: distributed.all_to_all_single(torch.empty(24), x), "all-to-all", 24),
    ],
)
def test_every_collective_of_torch_is_noted_even_if_nothing_else_is(
    mesh: Callable[..., DeviceMesh], run: Callable[[Tensor], Any], kind: CollectiveKind, elements: int
) -> None:
    mesh(4)
    recorder = Recorder(lambda: "forward", all_operators=False)
    with fake_mode(), StorageTracker(observe=recorder.note):
        x = torch.empty(24)
        recorder.begin()
        run(x)

    assert [each.work.collective for each in recorder.done] == [Collective(kind, F32 * elements, (0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("kind", "sent_bytes"),
    [
        ("all-gather", 750),
        ("reduce-scatter", 750),
        ("all-to-all", 750),
        ("all-reduce", 1500),
        ("broadcast", 1000),
        ("send", 1000),
        ("receive", 0),
    ],
)
def test_what_a_process_sends(kind: CollectiveKind, sent_bytes: int) -> None:
    assert Collective(kind, 1000, (0, 1, 2, 3)).sent_bytes == sent_bytes
    assert Collective(kind, 1000, (0,)).sent_bytes == 0
