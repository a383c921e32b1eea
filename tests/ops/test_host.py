import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.ops import hostmemory
from actbench.ops.hostmemory import from_host, to_host
from actbench.simulator import profiles
from actbench.simulator.card import simulated


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last), lambda: torch.ones(0)]
)
def test_a_round_trip_gives_the_tensor_back(make):
    x = make()
    host = to_host(x)
    back = from_host(host, x.device)

    assert torch.equal(back, x)
    assert back.stride() == x.stride()
    assert len({t.untyped_storage()._cdata for t in (x, host, back)}) == 3


def test_only_the_copy_in_host_memory_is_noted():
    x = torch.ones(300)
    host = to_host(x)
    back = from_host(host, x.device)

    assert [t.untyped_storage() in hostmemory.NOTED for t in (x, host, back)] == [False, True, False]


def test_fake_tensors_go_to_host_memory_and_come_back():
    with simulated(profiles.get("t4")), FakeTensorMode():
        for _ in range(2):  # a fake tensor mode answers a second, equal call from its cache
            x = torch.ones(300, device="cuda")
            host = to_host(x)

            assert [t.device.type for t in (x, host, from_host(host, x.device))] == ["cuda", "cpu", "cuda"]


@pytest.mark.gpu
def test_cuda_tensors_wait_in_page_locked_memory():
    x = torch.randn(1000, 1000, device="cuda")
    host = to_host(x)
    back = from_host(host, x.device)

    assert host.is_pinned()
    assert host.untyped_storage() in hostmemory.NOTED
    assert back.device == x.device
    assert torch.equal(back, x)
