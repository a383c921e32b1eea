"""Sketches by a matrix of independent entries, and by an orthonormal transform of the columns.

Rows of a transform of the columns take O(N d log N) work for an (N, d) matrix. ``dct`` is the DCT-II and ``dft`` the
real Fourier basis (1, then cosines and sines of each frequency): k rows drawn with replacement and scaled by sqrt(N /
k), as in arXiv 2201.13195. ``hadamard`` is the subsampled randomized Hadamard transform (Tropp, arXiv 1011.1595):
random signs first, then k different rows.

Without random signs a transform only moves what the rows hold: where X and Y have a common mean or are smooth along the
rows, a few frequencies hold everything, and the estimate is worse than one from plain rows. Signs prevent that.

Columns are transformed in chunks of 2 MiB, or of 8 columns where these are larger. Besides the result, about four
copies of a chunk exist.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from actbench.methods.randomized.ops import matrix as sketch
from actbench.methods.randomized.ops.halves import sketch_halves
from actbench.methods.randomized.ops.sketch import samples
from actbench.methods.randomized.ops.sketch.samples import CHUNK_BYTES, working_type
from actbench.ops.hostmemory import is_elsewhere
from actbench.ops.library import is_watched, traced
from actbench.ops.simulation import few_for_all
from actbench.units import MIB

PIECE_BYTES = 28 * MIB
"""What a product with S may take beside the sketch: of S, and of the halves of the matrix.

A product of 4,096 rows is one piece, for which a card's processors all have work; of seven pieces each has too little.
"""

_LEAST_ROWS = 64  # with fewer, adding to the (k, d) sums moves more bytes than the products are worth


def project(matrix: Tensor, seed: Tensor, size: int, kind: sketch.Kind) -> Tensor:
    """Return S M / sqrt(k) for S (k, rows) with entries of mean 0 and mean square 1: (k, d) in the working type.

    Signs are multiplied on a card by its matrix units: with float16 and bfloat16 matrices as they are, and with the two
    bfloat16 halves of float32 ones. That changes a number of M by at most 2**-17 of it. All other products are in the
    working type. Sums are in it always.
    """
    (rows, columns), own = matrix.shape, matrix.dtype
    by_units = kind == "rademacher" and own != torch.float64 and is_elsewhere(matrix) and not traced()
    halves, dtype = by_units and own == torch.float32, working_type(matrix)
    factor = dtype if not by_units else torch.bfloat16 if halves else own
    bytes_a_row = factor.itemsize * (2 * (sketch.space(size) + columns) if halves else sketch.space(size))
    step = max(PIECE_BYTES // bytes_a_row, _LEAST_ROWS)
    if 0 < rows <= step:
        return _piece(matrix, seed, 0, size, kind, factor, halves)
    starts, total = range(0, rows, step), None
    for first in starts if traced() else few_for_all(starts, of=matrix):
        made = _piece(matrix[first : first + step], seed, first, size, kind, factor, halves)
        total = made if total is None else total.add_(made)
        # else the piece would be alive beside the next
        del made
    return matrix.new_zeros(size, columns, dtype=dtype) if total is None else total


def _piece(
    part: Tensor, seed: Tensor, first: int, size: int, kind: sketch.Kind, factor: torch.dtype, halves: bool
) -> Tensor:
    """Return the product with the columns of S from ``first`` on, of the type ``factor``, in the working type.

    With ``halves`` each column is multiplied with both halves of a row.
    """
    scale = size**-0.5
    form = first, part.shape[0], size, kind, factor, 1 + halves
    if type(seed) is Tensor and (seed.is_cpu or seed.is_cuda) and not (traced() or is_watched()):
        entries = sketch.maker(*form, seed.device)(seed)
    else:
        entries = sketch.sketch_columns(seed, *form)
    if halves:
        return _wide_product(entries, sketch_halves(part.contiguous(), scale))
    if factor.itemsize < 4:
        return _wide_product(entries, part).mul_(scale)
    return torch.mm(entries, part if part.dtype == factor else part.to(factor)).mul_(scale)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices of a 16-bit type in float32, which torch has for cards alone."""
    return torch.mm(a, b, out_dtype=torch.float32)


Fourier = Literal["dct", "dft"]
_LEAST_COLUMNS = 8


def fourier(matrix: Tensor, seed: Tensor, size: int, kind: Fourier) -> Tensor:
    """Return sqrt(N / k) times k uniformly drawn rows of the transform, with replacement, in the working type."""
    rows = matrix.shape[0]
    chosen = samples.uniform(seed, rows, size)
    return transform_rows(matrix, chosen, kind).mul_((rows / size) ** 0.5)


def transform_rows(matrix: Tensor, chosen: Tensor, kind: Fourier) -> Tensor:
    """Return the chosen rows of the orthonormal transform along the first dimension, (k, d) in the working type.

    One real FFT gives both: row i is ``a_i Re F_f + b_i Im F_f`` of some frequency f. Rows 0 .. N // 2 of ``dft`` are
    cosines, the rest sines; row i of ``dct`` is frequency i.
    """
    dtype = working_type(matrix)
    frequency, real, imaginary = (_dct if kind == "dct" else _dft)(chosen, matrix.shape[0])
    real, imaginary = real[:, None].to(dtype), imaginary[:, None].to(dtype)
    out = matrix.new_empty(chosen.shape[0], matrix.shape[1], dtype=dtype)
    for columns in _column_chunks(matrix.shape[0], matrix.shape[1], dtype):
        part = matrix[:, columns].to(dtype)
        if kind == "dct":  # even rows, then odd ones backwards: Makhoul 1980
            part = torch.cat((part[::2], part[1::2].flip(0)))
        spectrum = torch.fft.rfft(part, dim=0, norm="ortho").index_select(0, frequency)
        out[:, columns] = spectrum.real * real + spectrum.imag * imaginary
    return out


def hadamard(matrix: Tensor, seed: Tensor, size: int) -> Tensor:
    """Return sqrt(P / k) R H D M: signs D, the orthonormal Hadamard transform H over P rows, k different rows R of it.

    P is N rounded up to a power of two; rows of zeros are added to a few columns at a time. Words 0 .. P - 1 of the
    seed's noise draw the rows; a column of S behind the bits of these holds the signs.
    """
    rows, dtype = matrix.shape[0], working_type(matrix)
    padded = 1 << max(rows - 1, 0).bit_length()
    chosen = samples.distinct(seed, padded, size)
    # the words take 64 P bits, and 128 columns have at least as many, since P < 2 rows
    signs = sketch.sketch_columns(seed, 128, 1, rows, "rademacher", dtype) * size**-0.5
    out = matrix.new_empty(size, matrix.shape[1], dtype=dtype)
    for columns in _column_chunks(padded, matrix.shape[1], dtype):
        part = matrix[:, columns].to(dtype) * signs
        part = torch.cat((part, part.new_zeros(padded - rows, part.shape[1])))
        out[:, columns] = _hadamard(part).index_select(0, chosen)
    return out


def _dft(chosen: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    sine = chosen > rows // 2
    frequency = torch.where(sine, chosen - rows // 2, chosen)
    alone = (frequency == 0) | (2 * frequency == rows)  # frequencies without a sine
    weight = (2 - alone.double()).sqrt()
    return frequency, torch.where(sine, 0.0, weight), torch.where(sine, weight, 0.0)


def _dct(chosen: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    mirrored = 2 * chosen > rows  # F_i is the conjugate of F_(N - i), which is not computed
    angle = chosen.double() * (math.pi / (2 * rows))
    weight = (2 - (chosen == 0).double()).sqrt()
    sine = torch.where(mirrored, -angle.sin(), angle.sin())
    return torch.where(mirrored, rows - chosen, chosen), weight * angle.cos(), weight * sine


def _hadamard(part: Tensor) -> Tensor:
    """Return the unscaled transform of the rows, a power of two of them, as products with two small matrices."""
    bits = (part.shape[0] - 1).bit_length()
    outer, inner = _hadamard_matrix(bits // 2, part), _hadamard_matrix(bits - bits // 2, part)
    mixed = (outer @ part.reshape(len(outer), -1)).view(len(outer), len(inner), part.shape[1])
    return (inner @ mixed).view(part.shape)


def _hadamard_matrix(bits: int, like: Tensor) -> Tensor:
    matrix = like.new_ones(1, 1)
    for _ in range(bits):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def _column_chunks(rows: int, columns: int, dtype: torch.dtype) -> list[slice]:
    step = max(CHUNK_BYTES // (max(rows, 1) * dtype.itemsize), _LEAST_COLUMNS)
    return [slice(first, first + step) for first in range(0, columns, step)]
