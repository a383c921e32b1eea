"""The memory in which blocks of CUDA's reductions leave sums for the last of them: rules of ``native/cuda/Reduce.cuh``.

Where a sum over the slow dimensions of a tensor has few results, such as the gradient of a bias, several blocks share
each. The buffer has a place for each thread of a block, though each block writes only its first row there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor

from actbench.simulator.caching import SMALLEST_BLOCK, round_up

_WARP = 32
# max_reduce_threads of Reduce.cuh; its threads are fewer where each has several results side by side
_MOST_THREADS = 512
_LEAST_VALUES, _MOST_VALUES = 16, 256  # that a thread adds up: values_per_thread in setReduceConfig


@dataclass(frozen=True)
class Processors:
    """The multiprocessors of a device, and the threads that run on each at once."""

    count: int
    threads: int


def buffer_bytes(x: Tensor, reduced: Collection[int], sum_bytes: int, processors: Processors) -> int:
    """Return the bytes of the buffer of a reduction of ``x`` over dimensions, whose sums have ``sum_bytes`` each."""
    over = _joined(x, reduced)
    kept = _joined(x, [dim for dim in range(x.dim()) if dim not in reduced])
    inputs, outputs = math.prod(size for _, size in over), math.prod(size for _, size in kept)
    along = not kept or (bool(over) and over[0][0] < kept[0][0])
    vector = 1 if along or kept[0][0] != 1 else _vector(x, [*kept[:1], *over, *kept[1:]])
    width, height = _block(inputs if along else outputs // vector, outputs if along else inputs, vector)
    values = _over(inputs, width) if along else inputs
    # threads of a block share no sums then, and have too few values for blocks to share any
    if values < height * _LEAST_VALUES and values < _MOST_VALUES:
        return 0
    values = _over(values, height)
    blocks, most = (
        _over(outputs // vector, 1 if along else width),
        processors.count * (processors.threads // (width * height)),
    )
    if values < _MOST_VALUES or blocks > most:
        return 0
    # ctas_per_output of setReduceConfig: the device is filled, but a thread adds up 16 values at least, 256 at most
    sharing = max(min(_over(most, blocks), _over(values, _LEAST_VALUES)), _over(values, _MOST_VALUES))
    if sharing == 1:
        return 0
    # global_memory_size of Reduce.cuh
    staged = sum_bytes * outputs * sharing * (1 if along else width * vector)
    # beside the sums an int32 counts the blocks that are done, for each group of those that share results
    return round_up(staged, SMALLEST_BLOCK) + round_up(4 * blocks, SMALLEST_BLOCK)


def _joined(x: Tensor, dims: Iterable[int]) -> list[tuple[int, int]]:
    """Return strides and sizes of dimensions, the fastest first, neighbours in memory as one."""
    found: list[tuple[int, int]] = []
    for stride, size in sorted((x.stride(dim), x.shape[dim]) for dim in dims if x.shape[dim] > 1):
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = found[-1][0], found[-1][1] * size
        else:
            found.append((stride, size))
    return found


def _vector(x: Tensor, dims: list[tuple[int, int]]) -> int:
    """Return how many results a thread has side by side; the first of ``dims`` is that of the results."""
    amounts = [x.storage_offset(), dims[0][1], *(stride for stride, _ in dims[1:])]
    return next(vector for vector in (4, 2, 1) if all(amount % vector == 0 for amount in amounts))


def _block(first: int, second: int, vector: int) -> tuple[int, int]:
    # set_block_dimension of Reduce.cuh rounds both down to powers of two
    most = _MOST_THREADS // vector
    first, second = (min(most, 1 << max(size, 1).bit_length() - 1) for size in (first, second))
    height = min(second, most // min(first, _WARP))
    return min(first, most // height), height


def _over(amount: int, size: int) -> int:
    return -(-amount // size)
