"""The caching allocator's rules, each by a sequence whose outcome is worked out by hand."""

from __future__ import annotations

import pytest

from actbench.simulator.caching import CachingAllocator, OutOfSegments
from actbench.units import GIB, MIB


def test_small_requests_share_segments_of_two_mebibytes() -> None:
    allocator = CachingAllocator(GIB)

    for name in range(5):
        allocator.allocate(name, MIB // 2)

    assert allocator.reserved_bytes == 2 * 2 * MIB  # four halves fill the first


def test_middling_requests_share_segments_of_twenty() -> None:
    allocator = CachingAllocator(GIB)

    for name in range(4):
        allocator.allocate(name, 6 * MIB)

    assert allocator.reserved_bytes == 2 * 20 * MIB  # three times 6 of 20; the 2 that are left serve no request of 6


def test_large_requests_have_segments_of_their_size_in_steps_of_two() -> None:
    allocator = CachingAllocator(GIB)

    allocator.allocate(0, 11 * MIB)

    assert allocator.reserved_bytes == 12 * MIB


def test_a_rest_of_at_most_one_mebibyte_stays_with_its_block() -> None:
    allocator = CachingAllocator(GIB)
    allocator.allocate(0, 11 * MIB)  # of a segment of 12

    allocator.allocate(1, 2 * MIB)

    assert allocator.reserved_bytes == 12 * MIB + 20 * MIB


def test_the_smallest_block_that_is_large_enough_serves() -> None:
    allocator = CachingAllocator(GIB)
    for name, size in enumerate((40, 20, 30)):
        allocator.allocate(name, size * MIB)
    for name in range(3):
        allocator.free(name)

    allocator.allocate(3, 25 * MIB)  # in the 30
    allocator.allocate(4, 40 * MIB)  # in the 40, which nothing has cut

    assert allocator.reserved_bytes == 90 * MIB


def test_free_neighbours_are_one_block_again() -> None:
    allocator = CachingAllocator(GIB)
    allocator.allocate(0, 40 * MIB)
    allocator.free(0)
    for name in (1, 2):
        allocator.allocate(name, 20 * MIB)
    allocator.free(2)
    allocator.free(1)

    allocator.allocate(3, 40 * MIB)

    assert allocator.reserved_bytes == 40 * MIB


def test_free_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.free(0)

    allocator.allocate(1, 80 * MIB)

    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (80 * MIB, 80 * MIB)


def test_memory_runs_out_while_pieces_of_it_are_free() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.free(0)
    allocator.allocate(1, 30 * MIB)  # cut from the 60, whose other 30 stay free

    with pytest.raises(OutOfSegments):
        allocator.allocate(2, 50 * MIB)
    allocator.allocate_beyond(2, 50 * MIB)

    assert allocator.reserved_bytes == 110 * MIB


def test_a_device_that_has_grown_is_full_again() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate_beyond(0, 120 * MIB)
    allocator.free(0)

    allocator.allocate(1, 110 * MIB)  # of the free segment
    with pytest.raises(OutOfSegments):
        allocator.allocate(2, 20 * MIB)
