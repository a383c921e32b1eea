"""Batches of codes as bases and differences, after base-delta-immediate compression (Pekhimenko et al., PACT 2012).

The compression is lossless and counts everything that decoding needs. A batch is 64 codes. A configuration says which
sources cover the codes (the implied base zero, and bases that the batch stores), how many bits a difference to a source
has, and whether a mask replaces zeros. A source covers ``low .. low + 2**delta - 1``: low is 0 for the implied base,
and ``2**delta / 2`` below a stored base. Each stored code is a field: the number of its source, then its difference to
low. A batch takes the smallest configuration that covers it. Configuration 0, the implied base with differences as wide
as a code, covers everything: it stores the batch as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from actbench.ops import noise

BATCH: Final = 64
"""Codes of a batch; the last may have fewer."""

BASE_BITS: Final = 8

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Configuration:
    """How a batch is stored.

    Attributes:
        immediate: Whether the implied base zero is a source; then it is the first.
        bases: How many bases are stored.
        delta: Bits of a difference.
        masked: Whether a mask replaces zeros.
    """

    immediate: bool
    bases: int
    delta: int
    masked: bool

    @property
    def selector(self) -> int:
        """Bits of the number of a source."""
        return (self.immediate + self.bases - 1).bit_length()

    @property
    def field(self) -> int:
        """Bits of a field."""
        return self.selector + self.delta

    @property
    def half(self) -> int:
        """How far a stored base lies above the lowest code that it covers."""
        return (1 << self.delta) >> 1

    def bits(self, kept: Counts) -> Counts:
        """Return the bits of batches with ``kept`` fields, without the byte for the configuration."""
        return kept * self.field + BASE_BITS * self.bases + BATCH * self.masked


@functools.cache
def configurations(bits: int, bases: int, zeros: bool) -> tuple[Configuration, ...]:
    """Return the configuration that stores codes as they are, then the others from short fields to long.

    Codes have at most 8 bits, batches at most 3 bases. ``zeros`` adds configurations with a mask.
    """
    sources = [(True, 0), *((immediate, count) for count in range(1, bases + 1) for immediate in (False, True))]
    others = [
        Configuration(immediate, count, delta, masked)
        for immediate, count in sources
        for delta in range(bits)
        for masked in ((False, True) if zeros else (False,))
    ]
    whole = Configuration(immediate=True, bases=0, delta=bits, masked=False)
    return (whole, *sorted(others, key=lambda each: (each.field, each.masked, each.bases)))


BaseChoice = Literal["random", "first", "smallest"]
Codes = NDArray[np.int16]
Flags = NDArray[np.bool_]

_MOST_BASES, _TOP = 3, 255


@dataclass
class Covering:
    """The configurations found for (batches, 64) codes.

    Attributes:
        chosen: (batches,), the number of each batch's configuration.
        bits: (batches,), the bits that it takes.
        sources: (batches, 64), the number of the source that covers each code.
        bases: (batches, 3); a configuration with n bases uses the first n.
    """

    chosen: Counts
    bits: Counts
    sources: NDArray[np.uint8]
    bases: Codes


def cover(codes: Codes, there: Flags, known: Sequence[Configuration], choice: BaseChoice, seed: int) -> Covering:
    """Find the smallest configuration that covers each batch of (batches, 64) codes; ``there`` marks codes that exist.

    The first configuration must cover everything. ``choice`` says which uncovered code sets the next base: a random
    one, the first, or the smallest. With the smallest, the base covers from that code upwards, so no choice covers more
    with as many bases.
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
    """Return the next base of each batch, chosen from its uncovered codes; any number where none is left."""
    if choice == "smallest":
        lowest = np.where(left, codes, _TOP).min(1)
        return np.asarray(np.minimum(lowest + half, _TOP), np.int16)
    order = left.cumsum(1)
    # numbers of 32 bits, as fractions of the codes that are left
    rank = (draws * order[:, -1]) >> 32 if choice == "random" else np.zeros(len(codes), np.int64)
    # of truth values argmax returns the first that is true
    return np.asarray(codes[np.arange(len(codes)), (order > rank[:, None]).argmax(1)])


def batches_of(codes: NDArray[np.uint8]) -> tuple[Codes, Flags]:
    """Return (n,) codes as (batches, 64), filled up with zeros, and a mask of the codes that exist."""
    # differences to a base may be below 0, and bases above 255
    table = np.zeros(-(-len(codes) // BATCH) * BATCH, np.int16)
    table[: len(codes)] = codes
    return table.reshape(-1, BATCH), (np.arange(len(table)) < len(codes)).reshape(-1, BATCH)


Bytes = NDArray[np.uint8]


class Compressed(NamedTuple):
    """Compressed codes.

    Attributes:
        chosen: (batches,), the number of each batch's configuration.
        bases: The stored bases, batch after batch.
        masks: 8 bytes for each batch with a mask: one bit a code, set where the code is stored.
        fields: All fields as one stream of bits, the lowest bit first.
    """

    chosen: Bytes
    bases: Bytes
    masks: Bytes
    fields: Bytes


def compress(codes: Bytes, known: Sequence[Configuration], choice: BaseChoice, seed: int) -> Compressed:
    """Return the smallest form of (n,) codes; arguments as of :func:`cover`."""
    table, there = batches_of(codes)
    found = cover(table, there, known, choice, seed)
    masked = _column(known, found.chosen, "masked") > 0
    kept = there & ~(masked[:, None] & (table == 0))
    stored = np.arange(found.bases.shape[1]) < _column(known, found.chosen, "bases")[:, None]
    lows = _lows(found.bases, known, found.chosen)
    fields = (table - np.take_along_axis(lows, found.sources.astype(np.int64), 1)).astype(np.int64)
    fields = (fields << _column(known, found.chosen, "selector")[:, None]) | found.sources
    return Compressed(
        found.chosen.astype(np.uint8),
        found.bases[stored].astype(np.uint8),
        np.packbits(kept[masked], axis=1, bitorder="little").ravel(),
        _written(fields[kept], _widths(kept, known, found.chosen)),
    )


def decompress(found: Compressed, known: Sequence[Configuration], count: int) -> Bytes:
    """Return the ``count`` codes that were compressed with the same configurations."""
    kept = (np.arange(len(found.chosen) * BATCH) < count).reshape(-1, BATCH)
    masked = _column(known, found.chosen, "masked") > 0
    kept[masked] = np.unpackbits(found.masks, bitorder="little").reshape(-1, BATCH).astype(bool)
    counts = _column(known, found.chosen, "bases")
    stored = np.arange(max(each.bases for each in known)) < counts[:, None]
    bases = np.zeros(stored.shape, np.int16)
    bases[stored] = found.bases
    lows = _lows(bases, known, found.chosen)
    batch = np.broadcast_to(np.arange(len(kept))[:, None], kept.shape)[kept]
    selector = _column(known, found.chosen, "selector")[batch]
    fields = _read(found.fields, _widths(kept, known, found.chosen))
    codes = np.zeros(kept.shape, np.uint8)
    codes[kept] = (fields >> selector) + lows[batch, fields & ((1 << selector) - 1)]
    return codes.ravel()[:count]


def _column(known: Sequence[Configuration], chosen: NDArray[np.integer], name: str) -> Counts:
    """Return an attribute of each batch's configuration."""
    return np.asarray(np.array([getattr(each, name) for each in known], np.int64)[chosen])


def _lows(bases: NDArray[np.int16], known: Sequence[Configuration], chosen: NDArray[np.integer]) -> Counts:
    """Return the lowest code that each source of each batch covers; the implied base, if used, is first."""
    lows = bases.astype(np.int64) - _column(known, chosen, "half")[:, None]
    nothing = np.zeros((len(lows), 1), np.int64)
    immediate = _column(known, chosen, "immediate")[:, None] > 0
    return np.where(immediate, np.hstack([nothing, lows]), np.hstack([lows, nothing]))


def _widths(kept: Flags, known: Sequence[Configuration], chosen: NDArray[np.integer]) -> Counts:
    return _column(known, chosen, "field").repeat(kept.sum(1))


def _written(fields: Counts, widths: Counts) -> Bytes:
    """Return fields as a stream of bits, the lowest first, without gaps."""
    starts = widths.cumsum() - widths
    bits = np.zeros(int(widths.sum()), np.uint8)
    for place in range(int(widths.max(initial=0))):
        has = widths > place
        bits[starts[has] + place] = (fields[has] >> place) & 1
    return np.packbits(bits, bitorder="little")


def _read(stream: Bytes, widths: Counts) -> Counts:
    """Return the fields of a stream."""
    starts = widths.cumsum() - widths
    bits = np.unpackbits(stream, bitorder="little")
    fields = np.zeros(len(widths), np.int64)
    for place in range(int(widths.max(initial=0))):
        has = widths > place
        fields[has] |= bits[starts[has] + place].astype(np.int64) << place
    return fields
