"""Packed optimizers on DTensors: shards step as the whole does, and their state goes to any number of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from actbench import optim
from actbench.errors import UsageError
from actbench.methods.formats.ops.smaqstep import rules as steprules
from actbench.methods.formats.optim.storage import CHUNK, Storage, storage_of

SHAPES = [[64, 128], [50, 256], [2, 4096], [70, 96], [8, 8], [64]]
WHOLE, CUT = ("weights.0", "weights.1", "weights.2", "weights.4", "weights.5"), "weights.3"
"""Parameters whose shards are of whole blocks, with uneven rows and with none; and one whose are not."""

CASES: dict[str, dict[str, Any]] = {
    "AdamW, smaq": {"kind": "AdamW", "encoding": "smaq"},
    "AdamW, int": {"kind": "AdamW", "encoding": "int:6,group_size=128,rounding=stochastic"},
    "AdamW, fp8, half": {"kind": "AdamW", "encoding": "fp8,rounding=stochastic", "dtype": "bfloat16"},
    "SGD, smaq": {"kind": "SGD", "encoding": "smaq,block=128"},
    "SGD, bf16": {"kind": "SGD", "encoding": "bf16,rounding=stochastic"},
    "AdamW, None": {"kind": "AdamW", "encoding": None},
}
FIRST, LAST = 3, 5
Found = dict[str, Any]


class Runs:
    """What jobs in several processes gave, by name and rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, list[Found]] = {}

    def launch(self, name: str, world: int, jobs: dict[str, dict[str, Any]]) -> None:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(list(jobs.values())))
        command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(path)]
        processes = [
            subprocess.Popen([*command, str(rank), str(world)], stderr=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        told = [process.communicate(timeout=500)[1] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(told)
        for number, job in enumerate(jobs):
            ranks = [torch.load(path.with_suffix(f".{number}.{rank}.pt")) for rank in range(world)]
            self.found[job] = ranks

    def of(self, job: str) -> Found:
        """Return what the first process found, in whose whole tensors all processes agree."""
        first, *others = self.found[job]
        for other in others:
            assert all(torch.equal(first["weights"][name], other["weights"][name]) for name in first["weights"])
        return first


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("shards"))
    cases = {name: {**case, "shapes": SHAPES} for name, case in CASES.items()}
    usual = cases["AdamW, smaq"]
    alone = {f"{name}: plain": {**case, "plain": True, "steps": [0, LAST]} for name, case in cases.items()}
    exact = {f"{name}: exact": {**alone[f"{name}: plain"], "encoding": None} for name in cases}
    begun = {f"{name}: one": {**case, "steps": [0, FIRST], "save": f"{name}: one"} for name, case in cases.items()}
    begun_plain = {"plain": {**usual, "plain": True, "steps": [0, FIRST], "save": "plain", "torch": "whole.pt"}}
    runs.launch("one", 1, {**alone, **exact, **begun, **begun_plain})
    runs.launch(
        "two",
        2,
        {
            **{f"{name}: two": {**case, "steps": [0, LAST]} for name, case in cases.items()},
            **{f"{name}: begun": {**case, "steps": [0, FIRST], "save": f"{name}: two"} for name, case in cases.items()},
            **{
                f"{name}: one to two": {**case, "steps": [FIRST, LAST], "load": f"{name}: one"}
                for name, case in cases.items()
            },
            "plain to two": {**usual, "steps": [FIRST, LAST], "load": "plain"},
            "taken": {**usual, "steps": [FIRST, LAST], "take": "whole.pt", "load": "plain"},
            **{f"{name}: again": {**case, "steps": [FIRST, LAST], "again": FIRST} for name, case in cases.items()},
            "flat": {**usual, "steps": [0, FIRST], "save": "flat", "options": {"flatten_optimizer_state_dict": True}},
            "from flat": {
                **usual,
                "steps": [FIRST, LAST],
                "load": "flat",
                "options": {"flatten_optimizer_state_dict": True},
            },
            "on the host": {**usual, "steps": [0, FIRST], "save": "host", "options": {"cpu_offload": True}},
            "from the host": {**usual, "steps": [FIRST, LAST], "load": "host"},
        },
    )
    runs.launch(
        "four",
        4,
        {
            **{
                f"{name}: two to four": {**case, "steps": [FIRST, LAST], "load": f"{name}: two"}
                for name, case in cases.items()
            },
            "four": {**usual, "steps": [0, FIRST], "save": "four"},
            "copies of shards": {**usual, "steps": [0, LAST], "replicas": 2},
        },
    )
    runs.launch(
        "fewer",
        1,
        {
            **{
                f"{name}: two to one": {**case, "steps": [FIRST, LAST], "load": f"{name}: two"}
                for name, case in cases.items()
            },
            **{
                f"{name}: two to plain": {**case, "plain": True, "steps": [FIRST, LAST], "load": f"{name}: two"}
                for name, case in cases.items()
            },
            "four to one": {**usual, "steps": [FIRST, LAST], "load": "four"},
        },
    )
    return runs


def assert_same(found: Found, expected: Found, names: tuple[str, ...]) -> None:
    for name in names:
        assert torch.equal(found["weights"][name], expected["weights"][name]), name
        state, other = (each["state"]["state"][name] for each in (found, expected))
        assert state.keys() == other.keys()
        for key, value in state.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), (name, key)


def distance(found: Found, expected: Found) -> float:
    return (found["weights"][CUT].double() - expected["weights"][CUT].double()).square().mean().sqrt().item()


def assert_as_near(runs: Runs, found: str, case: str) -> None:
    """Where blocks are cut otherwise, what rounding does to weights is as large as in one process."""
    exact, plain = runs.of(f"{case}: exact"), runs.of(f"{case}: plain")
    assert distance(runs.of(found), exact) <= 1.25 * distance(plain, exact)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_bits_of_one(runs: Runs, case: str) -> None:
    found, plain = runs.of(f"{case}: two"), runs.of(f"{case}: plain")
    assert_same(found, plain, WHOLE)
    assert_as_near(runs, f"{case}: two", case)
    held = [rank["held"]["weights.0"] for rank in runs.found[f"{case}: two"]]
    for key, value in runs.found[f"{case}: plain"][0]["held"]["weights.0"].items():
        assert sum(each[key].numel() for each in held) == value.numel()  # each has its own shard, no more


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one to two", "two to one", "two to four", "two to plain"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_with_another_number_of_processes(runs: Runs, case: str, way: str) -> None:
    assert_same(runs.of(f"{case}: {way}"), runs.of(f"{case}: plain"), WHOLE)
    assert_as_near(runs, f"{case}: {way}", case)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain to two", "taken", "from flat", "from the host", "four to one"])
def test_state_goes_every_way_that_torch_has(runs: Runs, way: str) -> None:
    assert_same(runs.of(way), runs.of("AdamW, smaq: plain"), WHOLE)
    assert_as_near(runs, way, "AdamW, smaq")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_each_process_holds_goes_on_to_the_bit_where_blocks_are_cut_too(runs: Runs, case: str) -> None:
    assert_same(runs.of(f"{case}: again"), runs.of(f"{case}: two"), (*WHOLE, CUT))


@pytest.mark.slow
def test_copies_of_shards_have_the_bits_of_one(runs: Runs) -> None:
    assert_same(runs.of("copies of shards"), runs.of("AdamW, smaq: plain"), WHOLE)


ENCODINGS = [
    "smaq",
    "smaq,block=96",
    "smaq,block=512",
    "int:6,rounding=stochastic",
    "bf16,rounding=stochastic",
    "fp16,rounding=stochastic",
    "fp8,group_size=3,rounding=stochastic",
    "fp8:e5m2,group_size=64",
    "nf4",
    "s2fp8,rounding=stochastic",
]
CPU = torch.device("cpu")


def cuts(storage: Storage) -> list[tuple[int, int]]:
    """Return two parts of whole units, of more than a chunk together, cut within the first chunk where units allow."""
    first = storage.unit * max(1, CHUNK // 3 // storage.unit)
    return [(0, first), (first, first + 2 * storage.unit * (CHUNK // 2 // storage.unit or 1))]


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_parts_of_whole_units_have_the_bytes_of_the_whole(encoding: str) -> None:
    storage = storage_of(encoding)
    parts, count = cuts(storage), cuts(storage)[-1][-1]
    values = drawn(count, 1)
    packed = [storage.pack(values[start:end], start) for start, end in parts]
    units = [storage.in_units(each, end - start, start) for each, (start, end) in zip(packed, parts, strict=True)]
    whole = storage.in_units(storage.pack(values), count)
    assert whole.shape == (count // storage.unit, storage.packed_bytes(storage.unit))
    assert torch.equal(torch.cat(units), whole)
    for each, unit, (start, _) in zip(packed, units, parts, strict=True):
        assert torch.equal(storage.from_units(unit, start), each)


@pytest.mark.sampled(fast=4, slow=3)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_parts_of_whole_units_are_stepped_with_the_noise_of_the_whole(encoding: str) -> None:
    storage = storage_of(encoding)
    parts, count = cuts(storage), cuts(storage)[-1][-1]
    rule = steprules.adam_rule(
        3.0, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False
    )
    whole, cut = drawn(count, 2), drawn(count, 2)
    moments = [storage.zeros(count, CPU) for _ in range(2)]
    of_parts = [[storage.zeros(end - start, CPU, start) for _ in range(2)] for start, end in parts]
    for step in range(2):
        gradient = drawn(count, step)
        storage.adam(whole, gradient, moments[0], moments[1], 7 + step, rule)
        for (start, end), (means, roots) in zip(parts, of_parts, strict=True):
            storage.adam(cut[start:end], gradient[start:end], means, roots, 7 + step, rule, start)
    assert torch.equal(whole, cut)
    for moment, packed in zip(moments, zip(*of_parts, strict=True), strict=True):
        units = [storage.in_units(each, end - start, start) for each, (start, end) in zip(packed, parts, strict=True)]
        assert torch.equal(torch.cat(units), storage.in_units(moment, count))


def spread(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor, mesh, [placement]))


def test_shards_of_columns_are_refused_where_they_would_be_packed(mesh: DeviceMesh) -> None:
    columns, vector = (spread(torch.randn(shape), mesh, Shard(1)) for shape in ((64, 128), (8, 8)))
    with pytest.raises(UsageError, match=r"shape \(64, 128\) is a DTensor with placements .*over dimension 0"):
        optim.AdamW([columns])
    optimizer = optim.AdamW([{"params": [columns], "encoding": None}, {"params": [vector]}])
    columns.grad, vector.grad = torch.ones_like(columns), torch.ones_like(vector)
    optimizer.step()
    assert optimizer.state[columns]["exp_avg"].placements == columns.placements


def test_gradients_that_are_not_added_up_yet_are(mesh: DeviceMesh) -> None:
    values, gradient = torch.randn(64, 128), torch.randn(64, 128)
    rows, plain = spread(values, mesh, Shard(0)), nn.Parameter(values.clone())
    rows.grad, plain.grad = DTensor.from_local(gradient, mesh, [Partial()]), gradient
    for parameter in (rows, plain):
        optim.AdamW([parameter]).step()
    assert torch.equal(rows.detach().full_tensor(), plain)


def test_state_that_is_spread_otherwise_is_refused(mesh: DeviceMesh) -> None:
    rows = spread(torch.randn(64, 128), mesh, Shard(0))
    rows.grad = torch.ones_like(rows)
    optimizer = optim.AdamW([rows])
    optimizer.step()
    saved = optimizer.state_dict()
    plain = optim.AdamW([nn.Parameter(torch.randn(64, 128))])
    with pytest.raises(UsageError, match="state 0: packed_exp_avg is a DTensor and its parameter is not: gather"):
        plain.load_state_dict(saved)
    copies = optim.AdamW([spread(torch.randn(64, 128), mesh, Replicate())])
    with pytest.raises(UsageError, match=r"placements \(Shard.*and its parameter has \(Replicate"):
        copies.load_state_dict(saved)
    other = optim.AdamW([spread(torch.randn(64, 256), mesh, Shard(0))])
    with pytest.raises(UsageError, match=r"packed_exp_avg must be 13312 bytes as 'smaq', found torch\.uint8"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_torchs_state_of_shards_is_packed_on_the_way(mesh: DeviceMesh, kind: str) -> None:
    values = [torch.randn(64, 128), torch.randn(8, 8)]
    rows, plain = [spread(each, mesh, Shard(0)) for each in values], [nn.Parameter(each) for each in values]
    options = {"momentum": 0.9} if kind == "SGD" else {}
    theirs = [getattr(torch.optim, kind)(held, lr=1e-2, **options) for held in (rows, plain)]
    for parameter in (*rows, *plain):
        parameter.grad = torch.full_like(parameter, 0.5)
    for each in theirs:
        each.step()
    ours = [getattr(optim, kind)(held, lr=1e-2, **options) for held in (rows, plain, rows)]
    ours[0].load_state_dict(theirs[0].state_dict())
    ours[1].load_state_dict(theirs[1].state_dict())
    ours[2].load_state_dict(theirs[1].state_dict())  # that of whole parameters
    for place, optimizer in ((0, ours[0]), (0, ours[2]), (1, ours[0]), (1, ours[2])):
        state, expected = optimizer.state[rows[place]], ours[1].state[plain[place]]
        for key, value in expected.items():
            found = state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key]
            assert torch.equal(found, value)
