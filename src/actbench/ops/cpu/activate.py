"""SiLU and the codes of its input on the CPU in one pass, where its bits are torch's.

Torch computes whole vectors one way and what does not fill them, at the end of each thread's part, by the C library.
Those few numbers are left to torch here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor
from torch.nn import functional

from actbench.ops.cpu import hugepages
from actbench.ops.cpu.compiled import BLOCK, Kernel, at, inlined
from actbench.ops.cpu.exponential import encoded_silu
from actbench.ops.cpu.exponential import silu as silu_of
from actbench.ops.cpu.lanes import MANY
from actbench.ops.cpu.stepwise import encode_block, in_registers
from actbench.ops.cpu.vectors import features

_PLACE: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the program has made the defaults
_LEAST_PART = 32768  # elements for which torch starts a thread
_STEPS = {"AVX2": 16, "AVX512": 32}  # elements of a step of torch's loop, two vectors; others have no fused products


def silu(x: Tensor, bounds: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Compute SiLU of x and pack, for each element, how many bounds lie strictly below it, in one pass.

    Args:
        x: float32, contiguous.
        bounds: float32, ascending, ``2**bits - 1`` of them.
        bits: 1 to 8.

    Returns:
        A tensor like x, and uint8 of ``ceil(x.numel() * bits / 8)`` bytes.
    """
    out = hugepages.empty_like(x)
    count = x.numel()
    packed = torch.empty((count * bits + 7) // 8, dtype=torch.uint8, device="cpu")
    _silu(count, count, x.data_ptr(), bounds.data_ptr(), bits, out.data_ptr(), packed.data_ptr())
    _finish(x, out)
    return out, packed


def _finish(x: Tensor, out: Tensor) -> None:
    """Write what torch computes outside its vectors."""
    count, step = x.numel(), _step()
    part = -(-count // max(1, min(torch.get_num_threads(), -(-count // _LEAST_PART))))
    if count % step == part % step == 0:
        return
    source, target = x.detach().view(-1), out.view(-1)
    for first in range(0, count, part):
        end = min(count, first + part)
        rest = slice(end - (end - first) % step, end)
        target[rest] = functional.silu(source[rest])


@functools.cache
def agrees(threads: int) -> bool:
    """Return whether :func:`silu` gives torch's bits with so many threads, tried once for each number of them.

    Torch may compute the exponential in another way on another processor or in its next version, or share out the work
    differently. Where it does, torch's operator and a second pass take the place of this one.
    """
    if _step() == 0 or "+fma" not in features():
        return False
    numbers = samples()
    vectors, alone = functional.silu(numbers), functional.silu(numbers.repeat_interleave(2)[::2])
    if not _same_as_torch(numbers):
        return False
    telling = numbers[(vectors != alone) & ~vectors.isnan()][:1]
    counts = (31, 1019, _LEAST_PART + 7235, _LEAST_PART * threads + 19)  # in one part, in two, and in as many as may be
    return all(_same_as_torch(telling.expand(count).contiguous()) for count in counts if telling.numel())


def samples() -> Tensor:
    """Return numbers of every sign and exponent, and many for which the result is neither x nor zero."""
    words = torch.arange(-(2**31), 2**31, 65521, device="cpu")  # 65,552 words, a prime apart
    return torch.cat([words.to(torch.int32).view(torch.float32), torch.linspace(-104, 104, 2**15, **_PLACE)])


def _same_as_torch(x: Tensor) -> bool:
    theirs, (ours, _) = functional.silu(x), silu(x, torch.zeros(1, **_PLACE), 1)
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    return bool(same.all())


def _step() -> int:
    return _STEPS.get(torch.backends.cpu.get_cpu_capability(), 0)


@inlined
def _silu_block(values: np.ndarray, bounds: np.ndarray, bits: int, out: np.ndarray, packed: np.ndarray) -> None:
    """Write SiLU and codes."""
    done = values.size // MANY * MANY
    if bits == 1:
        one = in_registers(bounds, 1)
        for i in range(0, done, MANY):
            encoded_silu(i, values, one, out, packed)
    elif bits == 2:
        three = in_registers(bounds, 3)
        for i in range(0, done, MANY):
            encoded_silu(i, values, three, out, packed)
    elif bits == 3:
        seven = in_registers(bounds, 7)
        for i in range(0, done, MANY):
            encoded_silu(i, values, seven, out, packed)
    elif bits == 4:
        fifteen = in_registers(bounds, 15)
        for i in range(0, done, MANY):
            encoded_silu(i, values, fifteen, out, packed)
    else:
        for i in range(0, done, MANY):
            silu_of(i, values, out)
        encode_block(values[:done], bounds, bits, packed)
    _silu_rest(values[done:], bounds, bits, out[done:], packed[done // 8 * bits :])


@inlined
def _silu_rest(values: np.ndarray, bounds: np.ndarray, bits: int, out: np.ndarray, packed: np.ndarray) -> None:
    """Write the same of what does not fill a step."""
    if values.size > 0:
        padded, computed = np.zeros(MANY, np.float32), np.empty(MANY, np.float32)
        padded[: values.size] = values
        silu_of(0, padded, computed)
        out[:] = computed[: values.size]
        encode_block(values, bounds, bits, packed)


@Kernel
def _silu(blocks: int, count: int, x: int, bounds: int, bits: int, out: int, packed: int) -> None:
    table = at(bounds, (1 << bits) - 1, np.float32)
    stream = at(packed, (count * bits + 7) // 8, np.uint8)
    step = BLOCK // 8 * bits
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        values, target = at(x, count, np.float32)[first:end], at(out, count, np.float32)[first:end]
        _silu_block(values, table, bits, target, stream[block * step : (block + 1) * step])
