"""Which calls of an operator go by torch's dispatcher, and which by the kernel at once."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.ops import bitpack, library


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


CODES = torch.arange(16, dtype=torch.uint8) % 4


@pytest.fixture
def dispatched(monkeypatch):
    """Count the calls that go by the dispatcher."""
    counted = []
    packed = bitpack.pack_codes
    operator = torch.ops.actbench.pack_codes.default
    (cell,) = [c for c in packed.__closure__ if c.cell_contents is operator]
    cell.cell_contents = lambda *arguments, **named: counted.append(arguments) or operator(*arguments, **named)
    yield counted
    cell.cell_contents = operator


def test_a_plain_tensor_does_not_go_by_the_dispatcher(dispatched):
    found = bitpack.pack_codes(CODES, 2)

    assert dispatched == []
    assert torch.equal(found, torch.ops.actbench.pack_codes(CODES, 2))


def test_names_and_missing_arguments_are_checked_by_the_operator():
    assert torch.equal(bitpack.pack_codes(CODES, bits=2), bitpack.pack_codes(CODES, 2))
    with pytest.raises((TypeError, RuntimeError), match="bits"):
        bitpack.pack_codes(CODES)
    with pytest.raises((TypeError, RuntimeError), match="at most 2 argument"):
        bitpack.pack_codes(CODES, 2, wide=True)
    with pytest.raises(ValueError, match="bits must be"):
        bitpack.pack_codes(CODES, 9)


def test_a_mode_sees_operators():
    with Seeing() as seen:
        bitpack.pack_codes(CODES, 2)

    assert seen.names[0] == "pack_codes.default"


def test_a_profiler_sees_operators():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bitpack.pack_codes(CODES, 2)

    assert "actbench::pack_codes" in {event.key for event in profile.key_averages()}


def test_fake_and_meta_tensors_go_by_the_dispatcher(dispatched):
    with FakeTensorMode() as mode:
        found = bitpack.pack_codes(mode.from_tensor(CODES), 2)
    bitpack.pack_codes(CODES.to("meta"), 2)

    assert isinstance(found, FakeTensor)
    assert len(dispatched) == 2


def test_transforms_of_functions_go_by_the_dispatcher(dispatched):
    def squared(x):
        bitpack.pack_codes(CODES, 2)
        return x.square().sum()

    torch.func.grad(squared)(torch.ones(2))

    assert len(dispatched) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_of_a_device_have_the_keys_of_plain_tensors(device):
    for x in (
        torch.ones(3, device=device),
        torch.ones(3, dtype=torch.uint8, device=device)[1:],
        torch.nn.Parameter(CODES / 2),
    ):
        assert library._plain_key(x.to(device).detach()) == device.upper()
    assert library._plain_key(torch.ones(3, dtype=torch.complex64, device=device).conj()) is None
    assert library._plain_key(torch.ones(3, device=device, requires_grad=True)) is None
