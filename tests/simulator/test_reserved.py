"""Blocks of several streams on one device."""

from __future__ import annotations

import pytest

from actbench.measuring.meters.peak import Event
from actbench.simulator.reserved import reserved_bytes
from actbench.units import GIB, MIB

BLOCK = 30 * MIB
TURNS: list[Event] = [(0, BLOCK), (0, 0), (1, BLOCK), (1, 0), (2, BLOCK), (2, 0)]


def reserved(streams: dict[int, str], *, limit: int = GIB, expandable: bool = False) -> int:
    return reserved_bytes([TURNS], limit_bytes=limit, expandable=expandable, streams=streams)


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize(
    ("streams", "blocks"),
    [({}, 1), ({1: "gather"}, 2), ({0: "gather", 2: "gather"}, 2), ({1: "gather", 2: "reduce"}, 3)],
)
def test_a_stream_does_not_use_the_free_blocks_of_another(
    streams: dict[int, str], blocks: int, expandable: bool
) -> None:
    whole = 40 * MIB if expandable else BLOCK  # in pages of 20 MiB

    assert reserved(streams, expandable=expandable) == blocks * whole


@pytest.mark.parametrize("expandable", [True, False])
def test_a_full_device_takes_back_what_is_free_on_any_stream(expandable: bool) -> None:
    limit = 50 * MIB

    assert reserved({1: "gather", 2: "reduce"}, limit=limit, expandable=expandable) <= limit


def test_what_does_not_fit_with_the_others_makes_the_device_larger() -> None:
    both: list[Event] = [(0, BLOCK), (1, BLOCK)]

    found = reserved_bytes([both], limit_bytes=50 * MIB, expandable=False, streams={1: "gather"})

    assert found == 2 * BLOCK
