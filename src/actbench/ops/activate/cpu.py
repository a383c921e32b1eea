"""SiLU or GELU and the codes of its input on the CPU in one pass, where their bits are torch's.

Torch computes SiLU of whole vectors one way and of what does not fill them, at the end of each thread's part, by the C
library; those few numbers are left to torch here. GELU it has from oneDNN, which computes all numbers alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor
from torch.nn import functional

from actbench.ops.activate.functions import encoded_gelu, encoded_silu
from actbench.ops.activate.functions import gelu as gelu_of
from actbench.ops.activate.functions import silu as silu_of
from actbench.ops.cpu.compiled import BLOCK, at, inlined, kernel
from actbench.ops.cpu.vectors import MANY, features, two_tables
from actbench.ops.stepwise.cpu import encode_block, in_registers

_CPU = torch.device("cpu")
_PLACE: Any = {"dtype": torch.float32, "device": _CPU}  # whatever the program has made the defaults
_LEAST_PART = 32768  # elements for which torch starts a thread
Rests = tuple[slice, ...]
"""Elements that torch computes otherwise than the kernel, in the order of memory."""

_STEPS = {"AVX2": 16, "AVX512": 32}  # elements of a step of torch's loop, two vectors; others have no fused products


class Fused(NamedTuple):
    """A function that has a kernel, which writes it and the codes.

    Attributes:
        state: What torch's way depends on besides the number of elements.
        rests: From that number and the state, what torch computes otherwise than the kernel; None where that is all.
    """

    kernel: Callable[..., None]
    state: Callable[[], int]
    rests: Callable[[int, int], Rests | None]


def rests_of(x: Tensor, function: str) -> Rests | None:
    """Return what is left to torch of a function of x in one pass; None where all is, since its bits are others."""
    found = ONE_PASS.get(function) if x.dtype == torch.float32 else None
    return None if found is None else found.rests(x.numel(), found.state())


def activate(out: Tensor, packed: Tensor, x: Tensor, function: str, rests: Rests, bounds: Tensor, bits: int) -> None:
    """Write a function of x but for the rests, which torch computes, and the codes of x."""
    count = x.numel()
    ONE_PASS[function].kernel(count, count, x.data_ptr(), bounds.data_ptr(), bits, out.data_ptr(), packed.data_ptr())
    for rest in rests:
        out.view(-1)[rest] = getattr(functional, function)(x.detach().view(-1)[rest])


@functools.lru_cache(maxsize=1024)
def _silu_rests(count: int, threads: int) -> Rests | None:
    return _outside_vectors(count, threads) if _silu_agrees(threads) else None


def _outside_vectors(count: int, threads: int) -> Rests:
    """Return the ends of threads' parts, for which torch calls the C library."""
    step, part = _step(), -(-count // max(1, min(threads, -(-count // _LEAST_PART))))
    if count % step == part % step == 0:
        return ()
    ends = [min(count, first + part) for first in range(0, count, part)]
    parts = zip(range(0, count, part), ends, strict=True)
    return tuple(slice(end - (end - first) % step, end) for first, end in parts if (end - first) % step)


@functools.lru_cache(maxsize=1024)
def _gelu_rests(count: int, with_onednn: int) -> Rests | None:
    """Return what torch does not give to oneDNN: a number alone."""
    if not _gelu_agrees(with_onednn):
        return None
    return (slice(0, 1),) if count == 1 else ()


def agrees(function: str, dtype: torch.dtype) -> bool:
    """Return whether there is a kernel with torch's bits, tried once for each state of torch that matters.

    Torch may compute a function in another way on another processor or in its next version; where it does, torch's
    operator and a second pass take the place of this one.
    """
    return rests_of(torch.empty(0, dtype=dtype, device=_CPU), function) is not None


@functools.cache
def _gelu_agrees(with_onednn: int) -> bool:
    if not (with_onednn and two_tables()):
        return False
    numbers = samples()
    return all(_same_as_torch(numbers[:count].contiguous(), "gelu", ()) for count in (2, 31, 1019, numbers.numel()))


@functools.cache
def _silu_agrees(threads: int) -> bool:
    if _step() == 0 or "+fma" not in features():
        return False
    numbers = samples()
    vectors, alone = functional.silu(numbers), functional.silu(numbers.repeat_interleave(2)[::2])
    if not _same_as_torch(numbers, "silu", _outside_vectors(numbers.numel(), threads)):
        return False
    telling = numbers[(vectors != alone) & ~vectors.isnan()][:1]
    counts = (31, 1019, _LEAST_PART + 7235, _LEAST_PART * threads + 19)  # in one part, in two, and in as many as may be
    return all(
        _same_as_torch(telling.expand(count).contiguous(), "silu", _outside_vectors(count, threads))
        for count in counts
        if telling.numel()
    )


def samples() -> Tensor:
    """Return numbers of every sign and exponent, infinities, and many for which the result is neither x nor zero."""
    infinities = torch.tensor([torch.inf, -torch.inf], **_PLACE)
    words = torch.arange(-(2**31), 2**31, 65521, device=_CPU)  # 65,552 words, a prime apart
    near = [torch.linspace(-end, end, 2**15, **_PLACE) for end in (104, 7)]
    return torch.cat([infinities, words.to(torch.int32).view(torch.float32), *near])


def _same_as_torch(x: Tensor, function: str, rests: Rests) -> bool:
    theirs = getattr(functional, function)(x)
    ours, codes = torch.empty_like(x), torch.empty(-(-x.numel() // 8), dtype=torch.uint8, device=_CPU)
    activate(ours, codes, x, function, rests, torch.zeros(1, **_PLACE), 1)
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    return bool(same.all())


def _step() -> int:
    return _STEPS.get(torch.backends.cpu.get_cpu_capability(), 0)


def _block_of(encoded: Any, alone: Any) -> Any:
    """Return what writes a function and the codes of a block.

    ``encoded`` writes both of 32 values for a table of up to 4 bits, ``alone`` the function of 32 values.
    """
    few, rest = _few_bits_of(encoded), _rest_of(alone)

    @inlined
    def block(values: np.ndarray, bounds: np.ndarray, bits: int, out: np.ndarray, packed: np.ndarray) -> None:
        done = values.size // MANY * MANY
        if bits <= 4:
            few(values[:done], bounds, bits, out, packed)
        else:
            for i in range(0, done, MANY):
                alone(i, values, out)
            encode_block(values[:done], bounds, bits, packed)
        rest(values[done:], bounds, bits, out[done:], packed[done // 8 * bits :])

    return block


def _few_bits_of(encoded: Any) -> Any:
    @inlined
    def few(values: np.ndarray, bounds: np.ndarray, bits: int, out: np.ndarray, packed: np.ndarray) -> None:
        if bits == 1:
            one = in_registers(bounds, 1)
            for i in range(0, values.size, MANY):
                encoded(i, values, one, out, packed)
        elif bits == 2:
            three = in_registers(bounds, 3)
            for i in range(0, values.size, MANY):
                encoded(i, values, three, out, packed)
        elif bits == 3:
            seven = in_registers(bounds, 7)
            for i in range(0, values.size, MANY):
                encoded(i, values, seven, out, packed)
        else:
            fifteen = in_registers(bounds, 15)
            for i in range(0, values.size, MANY):
                encoded(i, values, fifteen, out, packed)

    return few


def _rest_of(alone: Any) -> Any:
    @inlined
    def rest(values: np.ndarray, bounds: np.ndarray, bits: int, out: np.ndarray, packed: np.ndarray) -> None:
        """Write the same of what does not fill a step."""
        if values.size > 0:
            padded, computed = np.zeros(MANY, np.float32), np.empty(MANY, np.float32)
            padded[: values.size] = values
            alone(0, padded, computed)
            out[:] = computed[: values.size]
            encode_block(values, bounds, bits, packed)

    return rest


_silu_block = _block_of(encoded_silu, silu_of)
_gelu_block = _block_of(encoded_gelu, gelu_of)


@inlined
def _write(write: Any, block: int, count: int, x: int, bounds: int, bits: int, out: int, packed: int) -> None:
    first, end, step = block * BLOCK, min(count, (block + 1) * BLOCK), BLOCK // 8 * bits
    values, target = at(x, count, np.float32)[first:end], at(out, count, np.float32)[first:end]
    stream = at(packed, (count * bits + 7) // 8, np.uint8)[block * step : (block + 1) * step]
    write(values, at(bounds, (1 << bits) - 1, np.float32), bits, target, stream)


@kernel
def _silu(blocks: int, count: int, x: int, bounds: int, bits: int, out: int, packed: int) -> None:
    for block in prange(blocks):
        _write(_silu_block, block, count, x, bounds, bits, out, packed)


@kernel
def _gelu(blocks: int, count: int, x: int, bounds: int, bits: int, out: int, packed: int) -> None:
    for block in prange(blocks):
        _write(_gelu_block, block, count, x, bounds, bits, out, packed)


ONE_PASS = {
    "silu": Fused(_silu, torch.get_num_threads, _silu_rests),
    "gelu": Fused(_gelu, torch._C._get_mkldnn_enabled, _gelu_rests),
}
"""What has a kernel here, by the name that :mod:`actbench.ops.activate` has for it."""
