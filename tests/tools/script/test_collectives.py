"""Each function of torch.distributed works in a simulated group, or is refused by name."""

from __future__ import annotations

import datetime
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from groups import PROCESSES, on_card
from torch import Tensor, distributed, nn
from torch.distributed import ReduceOp, checkpoint, distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actbench.errors import MeasurementError

SHORTLY = datetime.timedelta(seconds=5)


@pytest.fixture
def joined() -> Iterator[None]:
    with on_card():
        distributed.init_process_group("nccl")
        yield


def wide(rows: int = 1) -> Tensor:
    """Return a tensor on the card whose values nobody knows."""
    return torch.rand(rows * 300, 300, device="cuda")


def several() -> list[Tensor]:
    return [wide() for _ in range(PROCESSES)]


def coalesced(call: Callable[[], Any]) -> None:
    with c10d._coalescing_manager(async_ops=True) as works:
        call()
        call()
    works.wait()


def at_once() -> None:
    calls = [distributed.P2POp(distributed.isend, wide(), 1), distributed.P2POp(distributed.irecv, wide(), 1)]
    for work in distributed.batch_isend_irecv(calls):
        work.wait()


CALLS: dict[str, Callable[[], Any]] = {
    "all_gather": lambda: distributed.all_gather(several(), wide()),
    "all_gather_coalesced": lambda: distributed.all_gather_coalesced([[wide()] for _ in range(PROCESSES)], [wide()]),
    "all_gather_into_tensor": lambda: distributed.all_gather_into_tensor(wide(PROCESSES), wide()),
    "all_gather_single": lambda: distributed.all_gather_single(wide(PROCESSES), wide()),
    "all_reduce": lambda: distributed.all_reduce(wide()),
    "all_reduce_coalesced": lambda: distributed.all_reduce_coalesced([wide(), wide()]),
    "all_to_all": lambda: distributed.all_to_all(several(), several()),
    "all_to_all_single": lambda: distributed.all_to_all_single(wide(PROCESSES), wide(PROCESSES)),
    "barrier": distributed.barrier,
    "batch_isend_irecv": at_once,
    "broadcast": lambda: distributed.broadcast(wide(), 0),
    "broadcast_object_list": lambda: distributed.broadcast_object_list([1], 0),
    "gather": lambda: distributed.gather(wide(), several()),
    "gather_into_tensor": lambda: distributed.gather_into_tensor(wide(), wide(PROCESSES)),
    "gather_single": lambda: distributed.gather_single(wide(), wide(PROCESSES)),
    "get_backend_impl": lambda: distributed.get_backend_impl(device=torch.device("cuda")),
    "irecv": lambda: distributed.irecv(wide(), 1).wait(),
    "isend": lambda: distributed.isend(wide(), 1).wait(),
    "monitored_barrier": distributed.monitored_barrier,
    "new_group": lambda: distributed.new_group([0, 1]),
    "new_subgroups": lambda: distributed.new_subgroups(2),
    "new_subgroups_by_enumeration": lambda: distributed.new_subgroups_by_enumeration([[0, 1], [2, 3]]),
    "recv": lambda: distributed.recv(wide()),
    "reduce": lambda: distributed.reduce(wide(), 0),
    "reduce_scatter": lambda: distributed.reduce_scatter(wide(), several()),
    "reduce_scatter_single": lambda: distributed.reduce_scatter_single(wide(), wide(PROCESSES)),
    "reduce_scatter_tensor": lambda: distributed.reduce_scatter_tensor(wide(), wide(PROCESSES)),
    "scatter": lambda: distributed.scatter(wide(), several()),
    "send": lambda: distributed.send(wide(), 1),
    "send_object_list": lambda: distributed.send_object_list([1, "two"], 1),
    "set_timeout": lambda: distributed.set_timeout(SHORTLY),
    "split_group": lambda: distributed.split_group(split_ranks=[[0, 1], [2, 3]]),
}
METHODS: dict[str, Callable[[Any], Any]] = {
    "allgather_coalesced": lambda group: group.allgather_coalesced([[wide()] * PROCESSES], [wide()]).wait(),
    "allgather_into_tensor_coalesced": lambda group: group.allgather_into_tensor_coalesced([wide(4)], [wide()]).wait(),
    "allreduce": lambda group: group.allreduce([wide()]).wait(),
    "allreduce_coalesced": lambda group: group.allreduce_coalesced([wide()]).wait(),
    "monitored_barrier": lambda group: group.monitored_barrier(),
    "monitored_barrier with a time": lambda group: group.monitored_barrier(SHORTLY, wait_all_ranks=True),
    "monitored_barrier of gloo": lambda _: distributed.new_group(backend="gloo").monitored_barrier(SHORTLY),
    "reduce_scatter_tensor_coalesced": lambda group: group.reduce_scatter_tensor_coalesced([wide()], [wide(4)]).wait(),
    "all_reduce, coalesced": lambda _: coalesced(lambda: distributed.all_reduce(wide())),
    "all_gather_into_tensor, coalesced": lambda _: coalesced(
        lambda: distributed.all_gather_into_tensor(wide(PROCESSES), wide())
    ),
}


def failures(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Return what calls raised, by name."""
    found = {}
    for name, call in calls.items():
        try:
            with warnings.catch_warnings(action="ignore"):  # of functions that torch will remove
                call()
        except Exception as error:
            found[name] = repr(error)
    return found


def test_functions_and_methods_work(joined: None) -> None:
    present = {name: call for name, call in CALLS.items() if hasattr(distributed, name)}

    assert failures(present) == {}
    assert failures({name: partial(call, distributed.group.WORLD) for name, call in METHODS.items()}) == {}


OF_OBJECTS = {"all_gather_object", "gather_object", "scatter_object_list"}
REFUSED: dict[str, Callable[[], Any]] = {
    "recv_object_list": lambda: distributed.recv_object_list([None], 1),
    "shrink_group": lambda: distributed.shrink_group([3]),
    "rpc.init_rpc": lambda: distributed.rpc.init_rpc("first"),
    "rpc.rpc_sync": lambda: distributed.rpc.rpc_sync("second", len),
}


def test_what_only_other_processes_know_is_refused_by_name(joined: None) -> None:
    for name, call in REFUSED.items():
        with pytest.raises(MeasurementError, match=f"torch.distributed.{name} is not simulated"):
            call()


def test_every_function_that_communicates_is_looked_at() -> None:
    """Torch adds functions; each that takes a group has a call above."""
    taking = {
        name
        for name, value in vars(distributed).items()
        if type(value) is FunctionType and not name.startswith("_") and "group" in inspect.signature(value).parameters
    }
    asking = {name for name in taking if name.startswith(("get_", "destroy_", "is_"))}

    assert taking - asking - CALLS.keys() - REFUSED.keys() - OF_OBJECTS == set()


def known(*values: int, device: str = "cuda") -> Tensor:
    return torch.tensor(values, device=device)


def reduced(op: Any, device: str) -> list[int]:
    given = known(2, 3, device=device)
    distributed.all_reduce(given, op=op)
    found: list[int] = given.tolist()
    return found


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_known_values_are_those_of_all_processes(joined: None, device: str) -> None:
    found: dict[str, Any] = {}
    row = partial(known, device=device)
    gathered, parts = [row(0, 0) for _ in range(PROCESSES)], [row(0, 0) for _ in range(PROCESSES)]
    one, exchanged, first, whole = row(0, 0), row(*range(8)), row(2, 3), row(*[0] * 8)

    distributed.gather(row(2, 3), gathered)
    distributed.scatter(one, [row(5 + place, 6) for place in range(PROCESSES)])
    distributed.all_to_all(parts, [row(place, 7) for place in range(PROCESSES)])
    distributed.all_to_all_single(exchanged, row(1, 2, 3, 4, 5, 6, 7, 8))
    distributed.reduce(first, 0)
    work = distributed.all_gather_into_tensor(whole, row(2, 3), async_op=True)
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        found[op] = reduced(getattr(ReduceOp, op), device)

    assert [each.tolist() for each in gathered] == [[2, 3]] * PROCESSES
    assert one.tolist() == [5, 6]
    assert [each.tolist() for each in parts] == [[0, 7]] * PROCESSES
    assert exchanged.tolist() == [1, 2] * PROCESSES  # the first part of each process, which has what this one has
    assert first.tolist() == [8, 12]
    assert whole.tolist() == [2, 3] * PROCESSES
    assert work.get_future().wait()[0] is whole
    assert found["SUM"] == [8, 12]
    assert found["PRODUCT"] == [16, 81]
    assert found["MIN"] == found["MAX"] == found["BAND"] == found["BOR"] == [2, 3]
    assert found["BXOR"] == [0, 0]


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_groups_begin_over_a_store_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, debug: str) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    distributed.set_debug_level_from_env()
    try:
        for make in (
            distributed.HashStore,
            lambda: distributed.FileStore(str(tmp_path / "store"), PROCESSES),
            lambda: distributed.TCPStore("localhost", 0, PROCESSES, True),  # by itself it waits for the others
        ):
            with on_card():
                distributed.init_process_group("nccl", store=make(), rank=0, world_size=PROCESSES)
                given = known(1)
                distributed.all_reduce(given)
                assert given.item() == PROCESSES
    finally:
        monkeypatch.undo()
        distributed.set_debug_level_from_env()


@pytest.mark.parametrize(("rank", "size", "naming"), [(0, 8, "a group of 8 processes"), (3, PROCESSES, "takes rank 3")])
def test_another_place_in_a_group_over_a_store_is_refused(rank: int, size: int, naming: str) -> None:
    with on_card(), pytest.raises(MeasurementError, match=naming):
        distributed.init_process_group("nccl", store=distributed.HashStore(), rank=rank, world_size=size)


def test_sharded_checkpoints_are_neither_written_nor_read(tmp_path: Path) -> None:
    with on_card() as card:
        distributed.init_process_group("nccl")
        init_device_mesh("cuda", (PROCESSES,))
        model = fully_shard(nn.Linear(300, 300).cuda())
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "first")
        checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "second").result()
        checkpoint.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "first")
        torch.save(model.state_dict(), tmp_path / "third.pt")

    assert not list(tmp_path.rglob("*"))
    assert {note.partition(":")[0] for note in card.notes} >= {
        "torch.distributed.checkpoint.save writes nothing",
        "torch.distributed.checkpoint.async_save writes nothing",
        "torch.distributed.checkpoint.load reads nothing",
        "torch.save writes nothing",
    }
