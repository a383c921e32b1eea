"""Saving and loading: the same bits go on, bytes stay bytes, and state of torch is packed on the way."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from actbench import optim
from actbench.errors import UsageError
from actbench.methods.formats.optim.storage import storage_of

OURS = {
    "AdamW": lambda held, **options: optim.AdamW(held, lr=1e-2, **options),
    "SGD": lambda held, **options: optim.SGD(held, lr=1e-2, momentum=0.9, dampening=0.5, **options),
}
THEIRS = {
    "AdamW": lambda held: torch.optim.AdamW(held, lr=1e-2),
    "SGD": lambda held: torch.optim.SGD(held, lr=1e-2, momentum=0.9, dampening=0.5),
}
COUNT = 80 * 70


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((80, 70), (8, 8), (70,))]


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def run(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in held_by(optimizer):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def assert_same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for p, q in zip(held_by(one), held_by(other), strict=True):
        assert torch.equal(p, q)
        assert one.state[p].keys() == other.state[q].keys()
        for name, value in one.state[p].items():
            assert value.dtype == other.state[q][name].dtype
            assert torch.equal(value, other.state[q][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("encoding", ["smaq", "int:6", "bf16", None])
@pytest.mark.parametrize("name", OURS)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(name, encoding, dtype, tmp_path: Path) -> None:
    whole = OURS[name](parameters(dtype), encoding=encoding, seed=5)
    run(whole, 0, 6)
    first = OURS[name](parameters(dtype), encoding=encoding, seed=5)
    run(first, 0, 3)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = OURS[name]([nn.Parameter(p.detach().clone()) for p in held_by(first)], encoding="smaq", seed=0)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert second.param_groups[0]["encoding"] == encoding
    run(second, 3, 6)
    assert_same(whole, second)


def test_state_is_plain_tensors_for_safetensors(tmp_path: Path) -> None:
    optimizer = OURS["AdamW"](parameters())
    run(optimizer, 0, 2)
    state_dict = optimizer.state_dict()
    tensors = {f"{i}.{name}": value for i, state in state_dict["state"].items() for name, value in state.items()}
    save_file(tensors, tmp_path / "state.safetensors")
    read = load_file(tmp_path / "state.safetensors")
    assert {read[f"0.{name}"].dtype for name in ("packed_exp_avg", "packed_root_exp_avg_sq")} == {torch.uint8}
    assert sum(read[f"0.{name}"].nbytes for name in ("packed_exp_avg", "packed_root_exp_avg_sq")) == 2 * storage_of(
        "smaq"
    ).packed_bytes(COUNT)
    states = {i: {name: read[f"{i}.{name}"] for name in state} for i, state in state_dict["state"].items()}
    other = OURS["AdamW"]([nn.Parameter(p.detach().clone()) for p in held_by(optimizer)])
    other.load_state_dict({**state_dict, "state": states})
    assert_same(optimizer, other)


def test_loaded_state_shares_no_memory_with_what_was_given() -> None:
    optimizer, other = OURS["AdamW"](parameters()), OURS["AdamW"](parameters())
    run(optimizer, 0, 2)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved["state"])
    other.load_state_dict(saved)
    run(other, 2, 4)
    for number, state in before.items():
        assert all(torch.equal(value, saved["state"][number][name]) for name, value in state.items())


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_go_on_as_the_original(name, duplicate) -> None:
    optimizer = OURS[name](parameters())
    run(optimizer, 0, 2)
    other = duplicate(optimizer)
    run(optimizer, 2, 4)
    run(other, 2, 4)
    assert_same(optimizer, other)
    other.add_param_group({"params": [nn.Parameter(torch.randn(64, 64))]})
    assert other.param_groups[1]["encoding"] == "smaq"


@pytest.mark.parametrize("encoding", ["smaq", "int:8,group_size=256", None])
@pytest.mark.parametrize("name", OURS)
def test_state_of_torch_is_packed_on_the_way(name, encoding) -> None:
    theirs = THEIRS[name](parameters())
    run(theirs, 0, 5)
    ours = OURS[name]([nn.Parameter(p.detach().clone()) for p in held_by(theirs)], encoding=encoding)
    ours.load_state_dict(theirs.state_dict())
    assert "foreach" not in ours.param_groups[0]
    exact, found = theirs.state[held_by(theirs)[0]], ours.state[held_by(ours)[0]]
    for moment, packed_name in type(ours).moments.items():
        expected = exact[moment].sqrt() if moment == "exp_avg_sq" else exact[moment]
        if encoding is None:
            assert torch.equal(found[moment], exact[moment])
            continue
        values = storage_of(encoding).unpack(found[packed_name], COUNT)
        assert (values - expected.flatten()).square().mean() < 2e-3 * expected.square().mean()
    run(theirs, 5, 6)
    run(ours, 5, 6)
    small, expected = held_by(ours)[1:], held_by(theirs)[1:]
    assert all(torch.equal(p, q) for p, q in zip(small, expected, strict=True))
    difference = (held_by(ours)[0] - held_by(theirs)[0]).abs().mean()
    assert 0 < difference < 2e-3 or encoding is None  # 0.01 a step of Adam's


def test_state_of_torch_without_buffers_begins_anew() -> None:
    theirs = torch.optim.SGD(parameters(), lr=0.1)
    run(theirs, 0, 1)
    ours = OURS["SGD"]([nn.Parameter(p.detach().clone()) for p in held_by(theirs)])
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["momentum"] == 0  # options are those that were saved
    run(ours, 1, 2)
    run(theirs, 1, 2)
    assert all(torch.equal(p, q) for p, q in zip(held_by(ours), held_by(theirs), strict=True))


def test_hooks_of_the_user_see_tensors_and_may_change_them() -> None:
    optimizer, seen = OURS["AdamW"](parameters()), []
    run(optimizer, 0, 2)
    other = OURS["AdamW"](parameters())
    other.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(state_dict["state"][0]["packed_exp_avg"]))
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[held_by(o)[0]]["packed_exp_avg"]))
    for _ in range(2):  # our own hook is gone after the first time
        other.load_state_dict(optimizer.state_dict())
    assert [tensor.dtype for tensor in seen] == [torch.uint8] * 4


def test_what_does_not_fit_is_refused() -> None:
    optimizer = OURS["AdamW"](parameters())
    run(optimizer, 0, 1)
    saved = optimizer.state_dict()
    size = 18 * 208 + (8 + 192 * 6 // 8 + 192 // 4 // 8)  # 18 blocks of 256 and one of 192
    with pytest.raises(UsageError, match=rf"state 0: packed_exp_avg must be {size} bytes as 'smaq', found torch.uint8"):
        OURS["AdamW"]([nn.Parameter(torch.randn(60, 80)), *parameters()[1:]]).load_state_dict(saved)
    changed = copy.deepcopy(saved)
    changed["param_groups"][0]["encoding"] = None
    with pytest.raises(UsageError, match="is packed, and its group has encoding=None"):
        OURS["AdamW"](parameters()).load_state_dict(changed)
    amsgrad = torch.optim.AdamW(parameters(), amsgrad=True)
    run(amsgrad, 0, 1)
    with pytest.raises(UsageError, match="amsgrad=True is not supported"):
        OURS["AdamW"](parameters()).load_state_dict(amsgrad.state_dict())
    with pytest.raises(UsageError, match="differs from that of this Adam; load the state into AdamW"):
        optim.Adam(parameters()).load_state_dict(torch.optim.AdamW(parameters()).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        OURS["AdamW"]([{"params": [p]} for p in parameters()]).load_state_dict(saved)
    theirs = torch.optim.AdamW(parameters())
    theirs.load_state_dict(saved)
    with pytest.raises(KeyError):  # torch must not take bytes for moments
        run(theirs, 1, 2)
