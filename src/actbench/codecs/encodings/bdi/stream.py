"""Codes as bytes and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actbench.codecs.encodings.bdi.configurations import BATCH, Configuration, Counts
from actbench.codecs.encodings.bdi.covering import BaseChoice, Flags, batches_of, cover

Bytes = NDArray[np.uint8]


class Compressed(NamedTuple):
    """Codes as they are kept.

    Attributes:
        chosen: (batches,), the number of each one's configuration.
        bases: Those of each batch in turn.
        masks: 8 bytes for each batch that leaves zeros out: a bit for each code, set where it is kept.
        fields: All fields as one stream, the first bit lowest.
    """

    chosen: Bytes
    bases: Bytes
    masks: Bytes
    fields: Bytes


def compress(codes: Bytes, known: Sequence[Configuration], choice: BaseChoice, seed: int) -> Compressed:
    """Return the smallest form of (n,) codes; arguments as :func:`~actbench.codecs.encodings.bdi.covering.cover`."""
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
    """Return the lowest code that each source of each batch covers, the implied base's first where it is one."""
    lows = bases.astype(np.int64) - _column(known, chosen, "half")[:, None]
    nothing = np.zeros((len(lows), 1), np.int64)
    immediate = _column(known, chosen, "immediate")[:, None] > 0
    return np.where(immediate, np.hstack([nothing, lows]), np.hstack([lows, nothing]))


def _widths(kept: Flags, known: Sequence[Configuration], chosen: NDArray[np.integer]) -> Counts:
    """Return the bits of each field."""
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
