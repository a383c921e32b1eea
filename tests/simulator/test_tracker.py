from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actbench.ops import hostmemory
from actbench.simulator import profiles
from actbench.simulator.card import place, simulated
from actbench.simulator.fake import fake_mode
from actbench.simulator.tracker import StorageTracker

FLOAT = 4
ROWS, WIDTH, HIDDEN = 64, 128, 512


@pytest.fixture(params=["real", "fake"])
def mode(request: pytest.FixtureRequest):
    return nullcontext() if request.param == "real" else fake_mode()


def test_bytes_come_with_a_tensor_and_go_with_it(mode) -> None:
    with mode, StorageTracker() as ledger:
        a = torch.empty(10, 3)
        b = a + 1
        assert ledger.live_bytes == 2 * 30 * FLOAT
        del a
        assert ledger.live_bytes == 30 * FLOAT
        del b

        assert ledger.live_bytes == 0
        assert ledger.peak_bytes == 2 * 30 * FLOAT


def test_views_and_in_place_operators_are_free(mode) -> None:
    with mode, StorageTracker() as ledger:
        a = torch.zeros(10, 3)
        b = a.t()[1:]
        a.mul_(2)
        assert ledger.live_bytes == 30 * FLOAT
        del a
        assert ledger.live_bytes == 30 * FLOAT
        del b
        assert ledger.live_bytes == 0


def test_a_view_of_what_was_there_before_is_charged_unless_it_was_added(mode) -> None:
    with mode:
        weight = torch.empty(5, 7)
        with StorageTracker() as ledger:
            ledger.add([weight])
            ledger.reset_peak()
            kept = weight.t()

            assert ledger.live_bytes == ledger.peak_bytes == 35 * FLOAT
            assert kept.shape == (7, 5)


def test_a_resized_storage_counts_anew(mode) -> None:
    with mode, StorageTracker() as ledger:
        a = torch.empty(8)
        a.resize_(100)

        assert ledger.live_bytes == 100 * FLOAT


def test_a_storage_that_is_freed_while_a_tensor_holds_it_counts_until_then(mode) -> None:
    """FSDP2 frees gathered parameters so, and allocates them again."""
    with mode, StorageTracker() as ledger:
        a = torch.empty(8)
        size = a.untyped_storage().nbytes()
        a.untyped_storage().resize_(0)
        assert ledger.live_bytes == 0
        b = torch.empty(2)
        a.untyped_storage().resize_(size)
        assert ledger.live_bytes == (8 + 2) * FLOAT
        del a

        assert ledger.live_bytes == 2 * FLOAT
        assert ledger.peak_bytes == (8 + 2) * FLOAT
        assert len({name for name, amount in ledger.events if amount}) == 3  # no name is used again
        assert b.shape == (2,)


def test_an_out_argument_is_not_new(mode) -> None:
    with mode, StorageTracker() as ledger:
        a = torch.empty(8)
        torch.add(a, 1, out=a)

        assert ledger.live_bytes == 8 * FLOAT


def test_storages_are_rounded_up_one_by_one(mode) -> None:
    with mode, StorageTracker(rounding=512) as ledger:
        kept = [torch.empty(1), torch.empty(128), torch.empty(129), torch.empty(0)]

        assert ledger.live_bytes == 512 + 512 + 2 * 512 + 0
        assert len(kept) == 4


def test_the_peak_begins_anew_at_what_is_alive(mode) -> None:
    with mode, StorageTracker() as ledger:
        a = torch.empty(100)
        _ = a + 1
        del _
        ledger.reset_peak()

        assert ledger.peak_bytes == 100 * FLOAT


def test_host_memory_counts_only_where_it_is_the_device() -> None:
    def copied(ledger: StorageTracker) -> Tensor:
        with ledger:
            source = torch.empty(256, device="cuda" if ledger.host_is_free else "cpu")
            copy = hostmemory.to_host(source)
            del source
        return copy

    device, cpu = StorageTracker(host_is_free=True), StorageTracker()
    with simulated(profiles.get("t4")), fake_mode():
        kept = copied(device), copied(cpu)

    assert device.live_bytes == 0
    assert device.peak_bytes == 256 * FLOAT
    assert cpu.live_bytes == 256 * FLOAT
    assert cpu.peak_bytes == 2 * 256 * FLOAT
    assert len(kept) == 2


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_states_of_the_generator_count_where_the_host_is_the_device(device: str) -> None:
    with simulated(profiles.get(device)), fake_mode(), StorageTracker(host_is_free=device != "cpu") as tracker:
        x = torch.ones(4, requires_grad=True, device=place())
        y = checkpoint(torch.cos, x, use_reentrant=False)
        state_bytes = 0 if tracker.host_is_free else torch.get_rng_state().nbytes
        assert tracker.live_bytes == 2 * 4 * FLOAT + state_bytes

        y.sum().backward()
        del y
        assert tracker.live_bytes == 2 * 4 * FLOAT  # x and its gradient


def test_temporaries_raise_the_peak_alone(mode) -> None:
    def thousand_in_exp(func: object, args: object, result: object) -> int:
        return 1000 if func is torch.ops.aten.exp.default else 0

    with mode, StorageTracker(temporaries=thousand_in_exp) as ledger:
        a = torch.empty(10)
        b = a.exp()

        assert ledger.live_bytes == 2 * 10 * FLOAT
        assert ledger.peak_bytes == 2 * 10 * FLOAT + 1000
        assert b.shape == a.shape


def test_a_training_step_equals_hand_arithmetic(mode) -> None:
    with mode:
        module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False))
        x = torch.randn(ROWS, WIDTH)
        with StorageTracker() as ledger:
            ledger.add([*module.parameters(), x])
            weights = (WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH) * FLOAT
            base = weights + ROWS * WIDTH * FLOAT
            assert ledger.live_bytes == base

            loss = module(x).square().mean()
            kept = (2 * ROWS * HIDDEN + ROWS * WIDTH) * FLOAT  # GELU's input and output, and the module's output
            assert ledger.live_bytes == base + kept + FLOAT  # the loss itself

            loss.backward()
            assert ledger.live_bytes == base + weights + FLOAT
            module.zero_grad(set_to_none=True)
            del loss
            assert ledger.live_bytes == base


def test_no_two_storages_have_one_name():
    with StorageTracker() as ledger:
        for _ in range(50):
            torch.empty(10)

    names = [name for name, amount in ledger.events if amount]
    assert len(set(names)) == len(names) == 50
