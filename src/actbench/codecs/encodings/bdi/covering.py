"""The smallest configuration that covers each batch, and with which bases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from actbench.codecs.encodings.bdi.configurations import BATCH, Configuration, Counts
from actbench.ops import noise

BaseChoice = Literal["random", "first", "smallest"]
Codes = NDArray[np.int16]
Flags = NDArray[np.bool_]

_MOST_BASES, _TOP = 3, 255


@dataclass
class Covering:
    """What was found for (batches, 64) codes.

    Attributes:
        chosen: (batches,), the number of each one's configuration.
        bits: (batches,), how many it takes.
        sources: (batches, 64), the number of the source that covers each code.
        bases: (batches, 3), of which a configuration uses the first.
    """

    chosen: Counts
    bits: Counts
    sources: NDArray[np.uint8]
    bases: Codes


def cover(codes: Codes, there: Flags, known: Sequence[Configuration], choice: BaseChoice, seed: int) -> Covering:
    """Try configurations on batches.

    Args:
        codes: (batches, 64).
        there: (batches, 64), false for what the last batch lacks.
        known: Configurations, of which the first covers everything.
        choice: Which uncovered code becomes the next base: any, the first, or the smallest, which half of what a base
            covers lies below, so that no choice covers more with as many bases.
        seed: Of the random choice.
    """
    batches, counts = len(codes), there.sum(1)
    found = Covering(
        np.zeros(batches, np.int64),
        known[0].bits(counts),
        np.zeros(codes.shape, np.uint8),
        np.zeros((batches, _MOST_BASES), np.int16),
    )
    draws = noise.lanes(seed, 0, _MOST_BASES * batches, 32, torch.device("cpu")).numpy().reshape(_MOST_BASES, batches)
    nonzero = there & (codes != 0)
    nonzero_counts = nonzero.sum(1)
    for number, configuration in enumerate(known):
        size = configuration.bits(nonzero_counts if configuration.masked else counts)
        smaller = np.flatnonzero(size < found.bits)
        if smaller.size:
            live = (nonzero if configuration.masked else there)[smaller]
            sources, bases, covered = _covered(codes[smaller], live, configuration, choice, draws[:, smaller])
            chosen = smaller[covered]
            found.chosen[chosen], found.bits[chosen] = number, size[chosen]
            found.sources[chosen], found.bases[chosen] = sources[covered], bases[covered]
    return found


def _covered(
    codes: Codes, live: Flags, configuration: Configuration, choice: BaseChoice, draws: Counts
) -> tuple[NDArray[np.uint8], Codes, Flags]:
    """Return the source of each live code, the bases, and whether all live codes of a batch have a source."""
    span = 1 << configuration.delta
    sources, bases = np.zeros(codes.shape, np.uint8), np.zeros((len(codes), _MOST_BASES), np.int16)
    left = live & (codes >= span) if configuration.immediate else live.copy()
    for place in range(configuration.bases):
        bases[:, place] = _base(codes, left, configuration.half, choice, draws[place])
        low = bases[:, place, None] - configuration.half
        hit = left & (codes >= low) & (codes < low + span)
        sources[hit] = configuration.immediate + place
        left &= ~hit
    return sources, bases, np.logical_not(left.any(axis=1))


def _base(codes: Codes, left: Flags, half: int, choice: BaseChoice, draws: Counts) -> Codes:
    """Return a base for each batch by the codes that are left; any number where there are none."""
    if choice == "smallest":
        lowest = np.where(left, codes, _TOP).min(1)
        return np.asarray(np.minimum(lowest + half, _TOP), np.int16)
    order = left.cumsum(1)
    rank = (draws * order[:, -1]) >> 32 if choice == "random" else np.zeros(len(codes), np.int64)
    return np.asarray(codes[np.arange(len(codes)), (order > rank[:, None]).argmax(1)])


def batches_of(codes: NDArray[np.uint8]) -> tuple[Codes, Flags]:
    """Return (n,) codes as (batches, 64), and which of these are there."""
    table = np.zeros(-(-len(codes) // BATCH) * BATCH, np.int16)
    table[: len(codes)] = codes
    return table.reshape(-1, BATCH), (np.arange(len(table)) < len(codes)).reshape(-1, BATCH)
