from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from actbench.ops import noise

THREADS = 256


@pytest.fixture
def probe(host_launch: Callable[..., None]) -> Callable[..., None]:
    def launch(kernel: str, *arguments: torch.Tensor | np.generic, blocks: int = 1) -> None:
        host_launch("probe", kernel, {}, blocks * THREADS, *arguments)

    return launch


def test_shuffles_reach_all_lanes_of_a_warp(probe: Callable[..., None]) -> None:
    x = torch.arange(THREADS, dtype=torch.float32)
    by_xor, by_down = torch.empty(THREADS), torch.empty(THREADS)

    probe("probe_sums", x, by_xor, by_down)

    expected = x.view(-1, 32).sum(1, keepdim=True).expand(-1, 32).flatten()
    assert torch.equal(by_xor, expected)
    assert torch.equal(by_down, expected)


def test_a_ballot_has_the_bit_of_each_lane(probe: Callable[..., None]) -> None:
    x = torch.randn(THREADS, generator=torch.Generator().manual_seed(1))
    votes = torch.empty(THREADS, dtype=torch.int32)

    probe("probe_ballot", x, votes)

    expected = [int("".join("01"[int(bit)] for bit in reversed(warp)), 2) for warp in (x > 0).view(-1, 32).tolist()]
    assert votes.numpy().view(np.uint32)[::32].tolist() == expected


def test_shared_memory_is_one_blocks_and_barriers_order_it(probe: Callable[..., None]) -> None:
    x = torch.arange(3 * THREADS, dtype=torch.float32)
    out = torch.empty_like(x)

    probe("probe_reversal", x, out, blocks=3)

    assert torch.equal(out, x.view(3, -1).flip(1).flatten())


def test_a_missing_barrier_shows(probe: Callable[..., None]) -> None:
    x = torch.arange(1, THREADS + 1, dtype=torch.float32)
    out = torch.empty_like(x)

    probe("probe_missing_barrier", x, out)

    assert not torch.equal(out, x.flip(0))


def test_a_barrier_that_a_thread_never_reaches_is_reported(probe: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match="wait for ever"):
        probe("probe_deadlock", torch.empty(1))


def test_arguments_are_held_against_the_signature(probe: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match="number of arguments"):
        probe("probe_deadlock")
    with pytest.raises(AssertionError, match="wrong size"):
        probe("probe_deadlock", np.int32(0))


def test_noise_is_that_of_the_reference(probe: Callable[..., None]) -> None:
    for seed, first in ((7, 0), (-1, 2**31 - 5), (2**63 - 1, 123456)):
        out = torch.empty(2, THREADS, 32)

        probe("probe_noise", out, noise.state_of(seed), np.uint32(first))

        expected = noise.numbers(seed, first, THREADS, 1, torch.device("cpu"))
        assert torch.equal(out[0], 256 + expected / 2**15)
        assert (out[1] == 256.5).all()
