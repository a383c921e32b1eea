from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.packing import HostOffload, Identity, SavedTensors, SiteState
from actbench.packing.codecs import OnHost
from actbench.packing.hostoffload import AtOnce, Copied, Lane
from actbench.simulator import profiles
from actbench.simulator.card import simulated
from actbench.simulator.tracker import StorageTracker
from actbench.units import MIB

CPU = torch.device("cpu")


class Noted(AtOnce):
    """Copies at once, and notes what was asked of it by the first number of the first tensor."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.log: list[str] = []

    def away(self, tensors: tuple[Tensor, ...]) -> Copied:
        return self._noted("away", super().away(tensors))

    def back(self, tensors: tuple[Tensor, ...]) -> Copied:
        return self._noted("back", super().back(tensors))

    def _noted(self, what: str, copied: Copied) -> Copied:
        number = int(copied.tensors[0].flatten()[0])
        self.log.append(f"{what} {number}")
        return Copied(copied.tensors, lambda: self.log.append(f"{what} {number} settled"))


@pytest.fixture
def lane():
    return Lane(Noted())


def log_of(lane):
    log, lane._copies.log = lane._copies.log, []
    return log


def sent(lane, count):
    """Send tensors of ones, twos and so on, and return what is kept of them."""
    packed = [
        lane.away((torch.full((3,), float(number)), torch.full((2, 2), float(number)))) for number in range(count)
    ]
    lane.settle()
    log_of(lane)
    return packed


def number_of(tensors):
    assert [tensor.shape for tensor in tensors] == [(3,), (2, 2)]
    (number,) = torch.cat([tensor.flatten() for tensor in tensors]).unique().tolist()
    return number


def test_what_leaves_is_held_until_the_next_leaves(lane):
    first, second = (torch.ones(1) * number for number in (1, 2))
    storage = weakref.ref(first.untyped_storage())
    lane.away((first,))
    del first
    assert storage() is not None
    lane.away((second,))
    assert storage() is None
    lane.settle()

    assert log_of(lane) == ["away 1", "away 1 settled", "away 2", "away 2 settled"]


def test_what_changes_on_its_way_is_an_error_when_it_is_asked_for_and_afterwards_changes_nothing(lane):
    first, second = torch.ones(3), torch.ones(3)
    packed = [lane.away((first,)), lane.away((second,))]
    first.add_(1)
    second.add_(1)
    lane.settle()

    assert lane.back(packed[0])[0].tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation while it was on its way"):
        lane.back(packed[1])


def test_the_tensor_kept_before_is_fetched_ahead(lane):
    packed = sent(lane, 3)
    assert number_of(lane.back(packed.pop())) == 2
    assert log_of(lane) == ["back 2", "back 2 settled", "back 1"]
    assert number_of(lane.back(packed.pop())) == 1
    assert log_of(lane) == ["back 1 settled", "back 0"]
    assert number_of(lane.back(packed.pop())) == 0

    assert log_of(lane) == ["back 0 settled"]


def test_nothing_is_fetched_ahead_where_it_is_switched_off():
    lane = Lane(Noted(), prefetch=False)
    packed = sent(lane, 3)
    for number in (2, 1, 0):
        assert number_of(lane.back(packed[number])) == number
        assert log_of(lane) == [f"back {number}", f"back {number} settled"]


def test_a_copy_of_a_packer_has_its_settings():
    packer = copy.deepcopy(SavedTensors(Identity(), placement=HostOffload(prefetch=False), dedup=False))

    assert (packer.codec, packer.placement.prefetch, packer.dedup) == (Identity(), False, None)


def test_a_tensor_that_several_layers_restore_does_not_drive_out_what_is_ahead(lane):
    packed = sent(lane, 2)
    for _ in range(3):
        assert number_of(lane.back(packed[1])) == 1
    assert number_of(lane.back(packed[0])) == 0

    assert [entry for entry in log_of(lane) if "settled" not in entry] == ["back 1", "back 0", "back 1", "back 1"]


def test_any_order_gives_the_right_tensors_and_holds_one_ahead_at_most(lane):
    packed = sent(lane, 8)
    order = [5, 2, 7, 0, 1, 6, 3, 4, 4, 5]

    assert [number_of(lane.back(packed[index])) for index in order] == order
    fetched = [entry for entry in log_of(lane) if entry.startswith("back")]
    started, settled = (sum(("settled" in entry) == done for entry in fetched) for done in (False, True))
    assert started - settled == 1
    assert lane._ahead is not None


def test_what_is_ahead_dies_with_what_it_was_fetched_from(lane):
    packed = sent(lane, 2)
    lane.back(packed[1])
    ahead = weakref.ref(lane._ahead.copied.tensors[0].untyped_storage())
    log_of(lane)
    packed.clear()
    gc.collect()

    assert log_of(lane) == ["back 0 settled"]  # before the block can be given to another tensor
    assert ahead() is None
    assert lane._ahead is None


def test_a_tensor_that_is_gone_is_not_fetched(lane):
    packed = sent(lane, 3)
    del packed[1]
    lane.back(packed[1])

    assert log_of(lane) == ["back 2", "back 2 settled"]


def test_no_step_fetches_from_the_one_before(lane):
    old = sent(lane, 1)
    del old
    (packed,) = sent(lane, 1)
    lane.back(packed)

    assert log_of(lane) == ["back 0", "back 0 settled"]
    del packed
    assert len(lane._before) == 0


CARD = profiles.get("t4")
CODECS = {True: GroupQuantization(), False: Identity()}


@pytest.mark.parametrize("compress", [True, False])
def test_the_meter_sees_the_bytes_leave_and_what_fetching_ahead_costs(compress):
    count, rows = 5, 2**18
    size = rows * 4 if not compress else rows * 2 // 8 + rows // 256 * 4
    packer, packed = SavedTensors(CODECS[compress], placement=HostOffload()), []
    with simulated(CARD), FakeTensorMode(), torch.device("cuda"), StorageTracker(host_is_free=True) as ledger:
        for _ in range(count):
            packed.append(packer.pack(torch.empty(rows), SiteState("", 2)))
            assert ledger.live_bytes == size  # what is leaving
        assert all(part.device.type == "cpu" for each in packed for part in each.parts)
        packer.settle()
        assert ledger.live_bytes == 0
        ledger.reset_peak()
        while packed:
            restored = packed.pop().unpack()
            parts = restored.nbytes if compress else 0
            assert ledger.live_bytes == (size if packed else 0) + (parts or size)
            del restored

    assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 2 * size + (rows * 4 if compress else 0)


def test_nothing_moves_where_host_memory_is_the_memory():
    x = torch.randn(1000)
    real = SavedTensors(GroupQuantization(), placement=HostOffload()).pack(x, SiteState("", 2))
    with FakeTensorMode():
        fake = SavedTensors(GroupQuantization(), placement=HostOffload()).pack(torch.randn(1000), SiteState("", 2))

    assert not isinstance(real.codec, OnHost)
    assert not isinstance(fake.codec, OnHost)


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("compress", [True, False])
def test_what_was_moved_is_what_would_have_been_kept(monkeypatch, compress, per_sample):
    monkeypatch.setattr("actbench.packing.packer.is_elsewhere", lambda x: True)
    x, found = torch.randn(8, 4, 8, 8).to(memory_format=torch.channels_last), []
    for placement in (HostOffload(), None):
        torch.manual_seed(1)
        packed = SavedTensors(CODECS[compress], placement=placement).pack(x, SiteState("", 2, per_sample=per_sample))
        found.append((packed.unpack(), packed.rows(2, 4), packed.bits))

    assert all(torch.equal(a, b) for a, b in zip(found[0][:2], found[1][:2], strict=True))
    assert found[0][0].stride() == x.stride()
    assert compress == (found[0][2] == found[1][2] == 2)


def test_a_copy_of_a_packer_moves_tensors_of_its_own():
    packer = SavedTensors(GroupQuantization(), placement=HostOffload())
    packer.placement.away((torch.ones(3),))
    twin = copy.deepcopy(packer)

    assert twin.placement is not packer.placement
    assert not twin.placement._lanes


@pytest.mark.gpu
def test_a_gpu_holds_two_tensors_and_each_step_uses_the_same_host_memory():
    """Of 8 tensors one is made and one leaves, or one is used and one comes, however far the host runs ahead."""
    device, size, moves = torch.device("cuda", 0), 64 * MIB, HostOffload()
    torch.cuda.synchronize()
    before, blocks = torch.cuda.memory_allocated(), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        packed = [moves.away((torch.full((size // 4,), float(number), device=device),)) for number in range(8)]
        moves.settle()
        totals = []
        while packed:
            totals.append(moves.back(packed.pop(), device)[0].mean())
        assert [float(total) for total in totals] == list(reversed(range(8)))
        blocks.append(torch.cuda.host_memory_stats()["num_host_alloc"])

    assert torch.cuda.max_memory_allocated() - before <= 2 * size + 1 * MIB
    assert torch.cuda.memory_allocated() - before <= 1 * MIB
    assert blocks[1] == blocks[2]
