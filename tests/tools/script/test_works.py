"""Tensors of asynchronous collectives are held as NCCL's process group holds them, until their works are waited for."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
from groups import PROCESSES, on_card, trained
from torch import Tensor, distributed, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from actbench.model.measured import Measurement

WIDTH, ROWS = 2048, 16
GRADIENTS_BYTES = 2 * WIDTH * WIDTH * 4


def by_futures(gradients: list[Tensor]) -> None:
    works = [distributed.all_reduce(each, async_op=True).get_future() for each in gradients]
    torch.futures.collect_all(works).wait()


def by_works(gradients: list[Tensor]) -> None:
    for work in [distributed.all_reduce(each, async_op=True) for each in gradients]:
        work.wait()


def at_once(gradients: list[Tensor]) -> None:
    for each in gradients:
        distributed.all_reduce(each)


Average = Callable[[list[Tensor]], None]


def averaged(average: Average, after: Callable[[Tensor], Any] = lambda loss: None) -> Measurement:
    """Return what a step needs of a loop that averages its gradients and drops them."""
    with on_card() as card:
        distributed.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            loss = model(torch.ones(ROWS, WIDTH, device="cuda")).sum()
            loss.backward()
            average([each.grad for each in model.parameters() if each.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
            after(loss)
    return card.measurement


@pytest.mark.parametrize(
    ("after", "steps"),
    [(lambda loss: None, 2), (lambda loss: loss.item(), 1), (lambda loss: torch.cuda.synchronize(), 1)],
    ids=["ahead", "item", "synchronize"],
)
def test_futures_let_gradients_be_held_for_two_steps_or_one_where_the_processor_waits(
    after: Callable[[Tensor], Any], steps: int
) -> None:
    waited, held = averaged(by_works, after), averaged(by_futures, after)
    assert held.peak_bytes - waited.peak_bytes == steps * GRADIENTS_BYTES
    assert any("work.wait()" in each for each in held.warnings)
    assert not any("work.wait()" in each for each in waited.warnings)


def test_barriers_free_what_was_held() -> None:
    def barrier(_: Tensor) -> None:
        torch.cuda.synchronize()
        distributed.barrier()

    assert averaged(by_futures, barrier).peak_bytes == averaged(by_works, barrier).peak_bytes


def test_works_that_are_waited_for_hold_as_little_as_collectives_that_are_done() -> None:
    assert averaged(by_works).peak_bytes == averaged(at_once).peak_bytes


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("equal", [True, False])
def test_lists_of_tensors_of_one_shape_pass_through_one_tensor(kind: str, equal: bool) -> None:
    rows = [1024] * PROCESSES if equal else [1024, *[512] * (PROCESSES - 1)]
    with on_card():
        distributed.init_process_group("nccl")
        parts = [torch.empty(each, 1024, device="cuda") for each in rows]
        own = torch.empty(1024, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        if kind == "all_gather":
            distributed.all_gather(parts, own)
        else:
            distributed.reduce_scatter(own, parts)
        assert torch.cuda.max_memory_allocated() - before == (PROCESSES * own.nbytes if equal else 0)
        assert torch.cuda.memory_allocated() == before


def test_streams_and_events_that_are_waited_for_end_works() -> None:
    def stream(_: Tensor) -> None:
        torch.cuda.current_stream().synchronize()

    def event(_: Tensor) -> None:
        recorded = torch.cuda.Event()
        recorded.record()
        recorded.synchronize()

    by_item = averaged(by_futures, lambda loss: loss.item()).peak_bytes
    assert averaged(by_futures, stream).peak_bytes == averaged(by_futures, event).peak_bytes == by_item


def test_works_are_waited_for_with_a_timeout() -> None:
    def average(gradients: list[Tensor]) -> None:
        for each in gradients:
            work = distributed.all_reduce(each, async_op=True)
            assert work is not None
            work.wait(timeout=datetime.timedelta(seconds=1))

    assert averaged(average).peak_bytes == averaged(by_works).peak_bytes


def test_coalesced_collectives_hold_nothing_once_all_are_waited_for() -> None:
    def average(gradients: list[Tensor]) -> None:
        with c10d._coalescing_manager(device=torch.device("cuda"), async_ops=True) as works:
            for each in gradients:
                distributed.all_reduce(each, async_op=True)
        works.wait()

    found = averaged(average)
    assert found.peak_bytes == averaged(by_works).peak_bytes
    assert not any("work.wait()" in each for each in found.warnings)


@pytest.mark.parametrize("hook", [None, default_hooks.fp16_compress_hook])
def test_only_what_a_hook_compresses_is_held_of_a_model_whose_gradients_torch_averages(hook: Any) -> None:
    def wrapped(model: nn.Module) -> nn.Module:
        made = DistributedDataParallel(model.cuda(), device_ids=[0])
        if hook is not None:
            made.register_comm_hook(None, hook)
        return made

    found = trained(wrapped)
    assert any("work.wait()" in each for each in found.warnings) == (hook is not None)
