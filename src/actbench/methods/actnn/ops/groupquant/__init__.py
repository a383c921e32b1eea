"""Numbers as codes of 1 to 8 bits in groups of 32 to 1024 with two bounds each; unbiased.

Elements keep their order: the codes of a vector are one stream (:mod:`actbench.ops.bitpack`), so every element costs
the same, and any part can be decoded alone. Each group costs one more 32-bit word, its smallest and largest value as
bfloat16. :mod:`actbench.methods.actnn.ops.groupquant.reference` says what a code means.

For comparisons, a vector may also be one group of any size with the same codes, in plain torch on any device.

All functions raise a ValueError for a wrong argument, and a KernelError if the CUDA kernel cannot be compiled or
launched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from actbench.methods.actnn.ops.groupquant import cpu, reference
from actbench.ops import bitpack, rawkernel
from actbench.ops.allocation import allocator
from actbench.ops.library import EVERYWHERE, Kernels, check_bits, check_contiguous, check_vector, copied, define
from actbench.ops.noise import check_seed


def packed_bytes(count: int, bits: int, group_size: int) -> int:
    """Return the bytes of ``count`` numbers: their codes, and 4 for each group."""
    return bitpack.packed_bytes(count, bits) + 4 * -(-count // group_size)


def launch_encode(
    codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool
) -> None:
    """Launch ``groupquant_encode`` of ``kernels/groupquant.cu``."""
    _launching_encoder(x.numel(), x.dtype, bits, group_size, stochastic)(codes, meta, x, seed)


@functools.lru_cache(maxsize=4096)
def _launching_encoder(
    count: int, dtype: torch.dtype, bits: int, group_size: int, stochastic: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Do as :func:`cpu.encoder` on CUDA: what a launch needs but for addresses takes as long as the launch."""
    macros, threads = {**_macros(dtype, group_size), "BITS": bits}, _threads(1, count, group_size)
    counts = np.int64(count), np.int64(bitpack.packed_bytes(count, bits)), np.int32(group_size)
    rounding = np.uint32(stochastic)

    def run(codes: Tensor, meta: Tensor, x: Tensor, seed: Tensor) -> None:
        rawkernel.launch("groupquant", "groupquant_encode", macros, threads, x, codes, meta, *counts, seed, rounding)

    return run


def launch_encode_rows(
    codes: Tensor,
    meta: Tensor,
    x: Tensor,
    widths: Tensor,
    total_bits: int,
    group_size: int,
    seed: Tensor,
    stochastic: bool,
) -> None:
    """Launch ``groupquant_encode_rows`` of ``kernels/groupquantrows.cu``."""
    rows, columns = x.shape
    counts = np.uint32(rows), np.int64(columns), np.int64(codes.numel()), np.int32(group_size)
    places = widths, widths.cumsum(0, dtype=torch.int64)
    arguments = x, codes, meta, *counts, *places, seed, np.uint32(stochastic)
    _launch_rows("encode_rows", x, group_size, *arguments)


def launch_words(meta: Tensor, x: Tensor, group_size: int) -> None:
    """Launch ``groupquant_words`` of ``kernels/groupquantrows.cu``."""
    rows, columns = x.shape
    arguments = x, meta, np.uint32(rows), np.int64(columns), np.int32(group_size)
    _launch_rows("words", x, group_size, *arguments)


def launch_decode(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, *_: object) -> None:
    """Launch ``groupquant_decode`` of ``kernels/groupquant.cu``."""
    first, start = divmod(start, group_size)  # the kernel begins at the first group that it needs
    if first:
        # groups are multiples of 32 elements, so that each begins at a whole byte
        codes, meta = codes[first * group_size // 8 * bits :], meta[first:]
    _launching_decoder(out.numel(), codes.numel(), out.dtype, bits, group_size, start)(out, codes, meta)


@functools.lru_cache(maxsize=4096)
def _launching_decoder(
    count: int, size: int, dtype: torch.dtype, bits: int, group_size: int, start: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Do as :func:`cpu.decoder` on CUDA, of codes of so many bytes and from an element of the first group on."""
    macros, threads = {**_macros(dtype, group_size), "BITS": bits}, _threads(1, start + count, group_size)
    counts = np.int64(count), np.int64(size), np.int32(group_size), np.int32(start)

    def run(out: Tensor, codes: Tensor, meta: Tensor) -> None:
        rawkernel.launch("groupquant", "groupquant_decode", macros, threads, codes, meta, out, *counts)

    return run


def launch_decode_rows(
    out: Tensor, codes: Tensor, meta: Tensor, widths: Tensor, group_size: int, first_row: int
) -> None:
    """Launch ``groupquant_decode_rows`` of ``kernels/groupquantrows.cu``."""
    rows, columns = out.shape
    counts = np.uint32(rows), np.int64(columns), np.int64(codes.numel()), np.int32(group_size)
    places = widths[first_row:], widths.cumsum(0, dtype=torch.int64)[first_row:]
    arguments = codes, meta[first_row * -(-columns // group_size) :], out, *counts, *places
    _launch_rows("decode_rows", out, group_size, *arguments)


def _threads(rows: int, columns: int, group_size: int) -> int:
    """Return the threads with work: a warp for as many groups of a row as its lanes share out."""
    return rows * -(-columns // (group_size * (32 // reference.lanes_of(group_size)))) * 32


def _macros(dtype: torch.dtype, group_size: int) -> dict[str, str | int]:
    return {"SCALAR": rawkernel.SCALARS[dtype], "LANES": reference.lanes_of(group_size)}


def _launch_rows(kernel: str, x: Tensor, group_size: int, *arguments: Tensor | np.generic) -> None:
    rows, columns = x.shape
    macros, threads = _macros(x.dtype, group_size), _threads(rows, columns, group_size)
    rawkernel.launch("groupquantrows", f"groupquant_{kernel}", macros, threads, *arguments)


@define(
    "groupquant_encode(Tensor x, int bits, int group_size, Tensor seed, bool stochastic) -> (Tensor, Tensor)",
    Kernels(cpu.encode, launch_encode, copied(reference.encode, results=2)),
)
def encode(x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool = True) -> tuple[Tensor, Tensor]:
    """Encode a vector.

    Args:
        x: (n,) float32, float16, bfloat16 or float64, contiguous; n may be 0.
        bits: 1 to 8.
        group_size: A multiple of 32 from 32 to 1024.
        seed: Seed of the noise: a 0-d int64 tensor on the device of x.
        stochastic: False for the nearest code, which needs no noise and is biased.

    Returns:
        uint8 ``(ceil(n * bits / 8),)``, the codes, and int32 ``(ceil(n / group_size),)``, the words of the groups.
    """
    check_bits(bits)
    _check_groups(x, group_size, 1)
    check_seed(seed, x.device)
    return _empty(x, bitpack.packed_bytes(x.numel(), bits), -(-x.numel() // group_size))


def encoder(
    x: Tensor, bits: int, group_size: int, stochastic: bool
) -> Callable[[Tensor, Tensor], tuple[tuple[Tensor, Tensor], int | None]]:
    """Return a function of a tensor and a seed that encodes the elements of the tensor in memory order.

    It also returns how many groups have a value that is not finite; on CUDA, where the host does not wait for the
    kernel, None.

    It is for tensors of the form of x without gaps in memory, while nothing sees operators
    (:func:`actbench.ops.library.is_watched`): what the operator checks and computes at each call is known of them.
    """
    size, groups = bitpack.packed_bytes(x.numel(), bits), -(-x.numel() // group_size)
    fill = (_launching_encoder if x.is_cuda else cpu.encoder)(x.numel(), x.dtype, bits, group_size, stochastic)
    new_codes, new_words = allocator((size,), torch.uint8, x.device), allocator((groups,), torch.int32, x.device)

    def run(x: Tensor, seed: Tensor) -> tuple[tuple[Tensor, Tensor], int | None]:
        codes, words = new_codes(), new_words()
        not_finite = fill(codes, words, x, seed)
        return (codes, words), not_finite

    return run


def decoder(
    shape: Sequence[int], dtype: torch.dtype, bits: int, group_size: int, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of codes and words that decodes all elements, into this shape; as :func:`encoder`."""
    count = math.prod(shape)
    fill = (
        _launching_decoder(count, bitpack.packed_bytes(count, bits), dtype, bits, group_size, 0)
        if device.type == "cuda"
        else cpu.decoder(count, dtype, bits, group_size, 0)
    )
    new = allocator(shape, dtype, device)

    def run(codes: Tensor, words: Tensor) -> Tensor:
        out = new()
        fill(out, codes, words)
        return out

    return run


@define(
    "groupquant_encode_(Tensor(a!) codes, Tensor(b!) meta, Tensor x, int bits, int group_size, Tensor seed,"
    " bool stochastic) -> ()",
    Kernels(cpu.encode, launch_encode, copied(reference.encode, results=2)),
)
def encode_(
    codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool = True
) -> None:
    """Do as :func:`encode`, into contiguous results of its sizes, which may be parts of larger tensors."""
    check_bits(bits)
    _check_groups(x, group_size, 1)
    check_seed(seed, x.device)
    check_vector(codes, torch.uint8, x.device, "codes")
    check_vector(meta, torch.int32, x.device, "meta")
    if (codes.numel(), meta.numel()) != (bitpack.packed_bytes(x.numel(), bits), -(-x.numel() // group_size)):
        found = f"{codes.numel()} bytes of codes and {meta.numel()} words"
        raise ValueError(f"{x.numel()} elements of {bits} bits in groups of {group_size} do not take {found}")


@define(
    "groupquant_decode(Tensor codes, Tensor meta, int bits, int group_size, SymInt start, SymInt count,"
    " ScalarType dtype) -> Tensor",
    Kernels(cpu.decode, launch_decode, copied(reference.decode)),
)
def decode(
    codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, count: int, dtype: torch.dtype
) -> Tensor:
    """Return elements ``start .. start + count - 1`` of the encoded vector: (count,) of a float type."""
    out = codes.new_empty(count, dtype=dtype)
    _check_decode(out, codes, meta, bits, group_size, start)
    return out


@define(
    "groupquant_decode_(Tensor(a!) out, Tensor codes, Tensor meta, int bits, int group_size, SymInt start) -> ()",
    Kernels(cpu.decode, launch_decode, reference.decode_),
)
def decode_(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int) -> None:
    """Do as :func:`decode`, into a contiguous tensor of any shape."""
    _check_decode(out, codes, meta, bits, group_size, start)


@define(
    "groupquant_encode_rows(Tensor x, Tensor row_bits, SymInt total_bits, int group_size, Tensor seed,"
    " bool stochastic) -> (Tensor, Tensor)",
    Kernels(cpu.encode_rows, launch_encode_rows, copied(reference.encode_rows, results=2)),
)
def encode_rows(
    x: Tensor, row_bits: Tensor, total_bits: int, group_size: int, seed: Tensor, stochastic: bool = True
) -> tuple[Tensor, Tensor]:
    """Encode rows, each with its own number of bits; no group belongs to two rows.

    Row r takes ``ceil(F / 8) * row_bits[r]`` bytes, behind the rows before it. Nothing waits for the device, so wrong
    ``row_bits`` raise no error: if one is not from 1 to 8, or their sum is above ``total_bits``, rows that do not fit
    decode to NaN.

    Args:
        x: (R, F) float32, float16, bfloat16 or float64, contiguous.
        row_bits: int32 ``(R,)`` on the device of x, each 1 to 8.
        total_bits: The sum of ``row_bits``.
        group_size: A multiple of 32 from 32 to 1024.
        seed: Seed of the noise, which counts the groups of all rows: a 0-d int64 tensor on the device of x.
        stochastic: False for the nearest code, which needs no noise and is biased.

    Returns:
        uint8 ``(ceil(F / 8) * total_bits,)``, the codes, and int32 ``(R * ceil(F / group_size),)``, the groups' words.
    """
    _check_groups(x, group_size, 2)
    check_vector(row_bits, torch.int32, x.device, "row_bits")
    check_seed(seed, x.device)
    if row_bits.numel() != x.shape[0] or total_bits < 0:
        raise ValueError(f"{x.shape[0]} rows need as many row_bits, found {row_bits.numel()} of sum {total_bits}")
    return _empty(x, -(-x.shape[1] // 8) * total_bits, x.shape[0] * -(-x.shape[1] // group_size))


@define(
    "groupquant_decode_rows(Tensor(a!) out, Tensor codes, Tensor meta, Tensor row_bits, int group_size,"
    " SymInt first_row) -> ()",
    Kernels(cpu.decode_rows, launch_decode_rows, reference.decode_rows),
)
def decode_rows(out: Tensor, codes: Tensor, meta: Tensor, row_bits: Tensor, group_size: int, first_row: int) -> None:
    """Write rows ``first_row .. first_row + out.shape[0] - 1`` into a contiguous (rows, F) tensor of a float type.

    Codes and words are as :func:`encode_rows` returns them; ``row_bits`` has all rows.
    """
    _check_groups(out, group_size, 2)
    check_vector(codes, torch.uint8, out.device, "codes")
    check_vector(meta, torch.int32, out.device, "meta")
    check_vector(row_bits, torch.int32, out.device, "row_bits")
    rows, last = row_bits.numel(), first_row + out.shape[0]
    if first_row < 0 or last > rows:
        raise ValueError(f"rows {first_row} to {last} are not among the {rows} rows")
    if meta.numel() != rows * -(-out.shape[1] // group_size):
        raise ValueError(f"{rows} rows of {out.shape[1]} elements do not have {meta.numel()} groups")


@define(
    "groupquant_words(Tensor x, int group_size) -> Tensor", Kernels(cpu.words, launch_words, copied(reference.words_of))
)
def words(x: Tensor, group_size: int) -> Tensor:
    """Return the words of the groups of rows (R, F), before encoding: int32 ``(R, ceil(F / group_size))``."""
    _check_groups(x, group_size, 2)
    return x.new_empty(x.shape[0], -(-x.shape[1] // group_size), dtype=torch.int32)


def ranges(meta: Tensor) -> Tensor:
    """Return maximum minus offset of each word, float32 of the shape of ``meta``; NaN for a NaN word."""
    low, high = reference.bounds_of(meta)
    return high - low


def group_ranges(x: Tensor, group_size: int) -> Tensor:
    """Return the :func:`ranges` of the groups of rows (R, F), before encoding: ``(R, groups a row)``."""
    return ranges(words(x, group_size))


def _encode_in_one(x: Tensor, bits: int, seed: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
    _check_one(x, bits)
    return reference.encode_in_one(x, bits, seed, stochastic)


def _decode_in_one(codes: Tensor, meta: Tensor, bits: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    check_bits(bits)
    return reference.decode_in_one(codes, meta, bits, start, count, dtype)


@define(
    "onegroup_encode(Tensor x, int bits, Tensor seed, bool stochastic) -> (Tensor, Tensor)",
    {EVERYWHERE: _encode_in_one},
)
def encode_in_one(x: Tensor, bits: int, seed: Tensor, stochastic: bool = True) -> tuple[Tensor, Tensor]:
    """Encode a vector as one group; the word is int32 ``(1,)``, or ``(0,)`` for no elements; else as :func:`encode`."""
    _check_one(x, bits)
    return _empty(x, bitpack.packed_bytes(x.numel(), bits), min(1, x.numel()))


@define(
    "onegroup_decode(Tensor codes, Tensor meta, int bits, SymInt start, SymInt count, ScalarType dtype) -> Tensor",
    {EVERYWHERE: _decode_in_one},
)
def decode_in_one(codes: Tensor, meta: Tensor, bits: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return elements ``start .. start + count - 1`` of a vector encoded by :func:`encode_in_one`, of a float type."""
    check_bits(bits)
    return codes.new_empty(count, dtype=dtype)


def _empty(x: Tensor, size: int, groups: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(size, dtype=torch.uint8), x.new_empty(groups, dtype=torch.int32)


def _check_groups(tensor: Tensor, group_size: int, dimensions: int) -> None:
    check_contiguous(tensor)
    if tensor.dim() != dimensions:
        raise ValueError(f"the tensor must have {dimensions} dimensions, found shape {tuple(tensor.shape)}")
    check_group_size(group_size)


def check_group_size(group_size: int) -> None:
    """Raise a ValueError unless groups may have so many elements."""
    if group_size % 32 or not 32 <= group_size <= 1024:
        raise ValueError(f"group_size must be a multiple of 32 from 32 to 1024, found {group_size}")


def _check_decode(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int) -> None:
    check_bits(bits)
    _check_groups(out, group_size, out.dim())
    check_vector(codes, torch.uint8, out.device, "codes")
    check_vector(meta, torch.int32, out.device, "meta")
    end = start + out.numel()
    if start < 0 or end > meta.numel() * group_size or bitpack.packed_bytes(end, bits) > codes.numel():
        held = f"{codes.numel()} bytes of codes of {bits} bits in {meta.numel()} groups of {group_size}"
        raise ValueError(f"elements {start} to {end} are not in {held}")


def _check_one(x: Tensor, bits: int) -> None:
    check_bits(bits)
    check_contiguous(x)
    if x.dim() != 1:
        raise ValueError(f"the tensor must be a vector, found shape {tuple(x.shape)}")
