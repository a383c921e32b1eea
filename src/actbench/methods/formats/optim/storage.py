"""How the state of an optimizer is stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from actbench.errors import UsageError
from actbench.methods.formats import encodings
from actbench.methods.formats.encodings import Encoding, Smaq
from actbench.methods.formats.ops import smaqstep
from actbench.methods.formats.ops.smaqstep import rules as steprules
from actbench.methods.formats.ops.smaqstep.rules import AdamRule, SgdRule
from actbench.ops import noise
from actbench.ops.simulation import one_for_all

CHUNK = 1 << 18
"""Elements that are float32 at a time; temporary memory is a dozen times their 1 MiB. Groups and blocks divide it."""


class _Chunk(NamedTuple):
    """A chunk, or what of it is in a part of a tensor.

    Attributes:
        number: Of the chunk in the whole tensor.
        start: First element, in the part.
        end: Behind the last element, in the part.
        skipped: Elements of the chunk that are before the part.
        place: Its first byte in the packed part.
    """

    number: int
    start: int
    end: int
    skipped: int
    place: int

    @property
    def elements(self) -> int:
        """Elements that are there."""
        return self.end - self.start


class ChunkedStorage:
    """The parts of each chunk as bytes, chunk behind chunk, of an encoding of fixed bytes that really stores.

    In :meth:`adam` and :meth:`sgd`, here and in :class:`SmaqStorage`, parameter and gradient are contiguous vectors of
    float32, float16 or bfloat16, and the seed of their noise is another one at each step and for each parameter.
    Everywhere ``count`` numbers may be a part of a tensor, from number ``first`` on. Chunks are those of the whole
    tensor, and so is the noise.

    Attributes:
        unit: Numbers after which the format begins afresh: a part that is cut at multiples of it has the codes and the
            noise that it has in the whole.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        unit = encoding.unit
        self.unit = CHUNK if unit is None or CHUNK % unit else unit

    def packed_bytes(self, count: int, first: int = 0) -> int:
        """Return the bytes of ``count`` numbers."""
        *_, last = (_Chunk(0, 0, 0, 0, 0), *self._chunks(count, first))
        return last.place + self._bytes(last.elements)

    def zeros(self, count: int, device: torch.device, first: int = 0) -> Tensor:
        """Return the bytes of ``count`` zeros, uint8."""
        packed = torch.empty(self.packed_bytes(count, first), dtype=torch.uint8, device=device)
        for chunk in self._stepped(packed, count, first):
            self._write(packed, chunk, torch.zeros(chunk.elements, device=device), seed=0)
        return packed

    def pack(self, values: Tensor, first: int = 0) -> Tensor:
        """Return the bytes of float32 ``(n,)``."""
        packed = torch.empty(self.packed_bytes(values.numel(), first), dtype=torch.uint8, device=values.device)
        for chunk in self._chunks(values.numel(), first):
            self._write(packed, chunk, values[chunk.start : chunk.end], self._seed(0, 0, chunk))
        return packed

    def unpack(self, packed: Tensor, count: int, first: int = 0) -> Tensor:
        """Return float32 ``(count,)``."""
        found = [self._read(packed, chunk) for chunk in self._chunks(count, first)]
        return torch.cat(found) if found else torch.empty(0, device=packed.device)

    def in_units(self, packed: Tensor, count: int, first: int = 0) -> Tensor:
        """Return the bytes of whole units in rows, those of a unit together: uint8 ``(count / unit, bytes)``."""
        rows = [self._rows(packed, chunk) for chunk in self._chunks(count, first)]
        return torch.cat(rows) if rows else packed.new_empty(0, self.packed_bytes(self.unit))

    def from_units(self, units: Tensor, first: int = 0) -> Tensor:
        """Return the bytes that :meth:`in_units` was given."""
        count = len(units) * self.unit
        packed = units.new_empty(self.packed_bytes(count, first))
        for chunk in self._chunks(count, first):
            rows = units[chunk.start // self.unit : chunk.end // self.unit]
            sizes = [_bytes_of(*part) // len(rows) for part in _parts_of(self.encoding.spec, chunk.elements)]
            data = torch.cat([part.reshape(-1) for part in torch.split(rows, sizes, 1)])
            packed[chunk.place : chunk.place + data.numel()] = data
        return packed

    def adam(
        self, param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule, first: int = 0
    ) -> None:
        """Step a parameter by Adam or AdamW, and its packed first moment and root of the second, in place."""
        for chunk in self._stepped(param, param.numel(), first):
            self._adam(chunk, param, grad, means, roots, seed, rule)

    def sgd(self, param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule, first: int = 0) -> None:
        """Step a parameter by SGD with momentum, and its packed buffer, in place."""
        for chunk in self._stepped(param, param.numel(), first):
            self._sgd(chunk, param, grad, buffers, seed, rule)

    def _adam(
        self, chunk: _Chunk, param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule
    ) -> None:
        here = slice(chunk.start, chunk.end)
        m, s = self._read(means, chunk), self._read_roots(roots, chunk)
        p, m, s = steprules.adam(param[here].float(), grad[here].float(), m, s, rule)
        param[here] = p
        self._write(means, chunk, m, self._seed(seed, 0, chunk))
        self._write(roots, chunk, s, self._seed(seed, 1, chunk))

    def _sgd(self, chunk: _Chunk, param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule) -> None:
        here = slice(chunk.start, chunk.end)
        p, b = steprules.sgd(param[here].float(), grad[here].float(), self._read(buffers, chunk), rule)
        param[here] = p
        self._write(buffers, chunk, b, self._seed(seed, 0, chunk))

    def _seed(self, seed: int, moment: int, chunk: _Chunk) -> int:
        of_chunk = noise.mixed(noise.mixed(seed) ^ (2 * chunk.number + moment))
        return self.encoding.seed_from(of_chunk, chunk.skipped)

    def _write(self, packed: Tensor, chunk: _Chunk, values: Tensor, seed: int) -> None:
        parts = self.encoding.encode(values, torch.full((), seed, dtype=torch.int64, device=values.device))
        data = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        packed[chunk.place : chunk.place + data.numel()] = data

    def _read(self, packed: Tensor, chunk: _Chunk) -> Tensor:
        return self.encoding.decode(self._parts(packed, chunk), (chunk.elements,), torch.float32)

    def _read_roots(self, packed: Tensor, chunk: _Chunk) -> Tensor:
        """Return numbers that are divided by: none is nearer to zero than half a step, as in SmaQ's own operator."""
        parts, count = self._parts(packed, chunk), chunk.elements
        roots, least = self.encoding.decode(parts, (count,), torch.float32), self.encoding.half_steps(parts, count)
        return roots.clamp_(min=0) if least is None else torch.maximum(roots, least)

    def _rows(self, packed: Tensor, chunk: _Chunk) -> Tensor:
        """Return the units of a chunk, of each the bytes of all parts."""
        units = chunk.elements // self.unit
        return torch.cat([part.view(torch.uint8).reshape(units, -1) for part in self._parts(packed, chunk)], 1)

    def _parts(self, packed: Tensor, chunk: _Chunk) -> tuple[Tensor, ...]:
        left, parts = packed[chunk.place :], []
        for dtype, shape in _parts_of(self.encoding.spec, chunk.elements):
            size = _bytes_of(dtype, shape)
            parts.append(left[:size].clone().view(dtype).view(shape))  # cloned, because numbers must be aligned
            left = left[size:]
        return tuple(parts)

    def _bytes(self, count: int) -> int:
        return self.encoding.packed_bytes((count,), torch.float32) if count else 0

    def _chunks(self, count: int, first: int) -> Iterator[_Chunk]:
        """Yield the chunks that a part of a tensor has elements of."""
        start = place = 0
        while start < count:
            number, skipped = divmod(first + start, CHUNK)
            end = min(start + CHUNK - skipped, count)
            yield _Chunk(number, start, end, skipped, place)
            place += self._bytes(end - start)
            start = end

    def _stepped(self, written: Tensor, count: int, first: int) -> Iterator[_Chunk]:
        """Yield the chunks that are written one after the other; of a fake tensor one for all."""
        return one_for_all(list(self._chunks(count, first)), of=written)


@functools.lru_cache(maxsize=1024)
def _parts_of(spec: str, count: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Return type and shape of each part that ``count`` numbers are stored as."""
    with _disable_current_modes(), FakeTensorMode():  # no memory, and no meter sees it
        parts = encodings.build(spec).encode(torch.zeros(count, device="cpu"), torch.tensor(0, device="cpu"))
    return tuple((part.dtype, tuple(part.shape)) for part in parts)


def _bytes_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


# as of bitsandbytes (min_8bit_size) and torchao, whose optimizers keep smaller state whole, too
LEAST_PACKED = 4096
"""Elements of the smallest parameter whose state is packed."""


_WHOLE = "shape_of_whole"


def mark_as_share(part: Tensor, shape: torch.Size) -> None:
    """Mark a shard with the shape of its full parameter; whether state is packed depends on the full shape."""
    setattr(part, _WHOLE, shape)


def is_packed(parameter: Tensor) -> bool:
    """Return whether the state of a parameter is packed; state of norms, biases and small parameters stays float32.

    The shape of the full parameter decides for a shard, so that the answer is the same for any number of processes.
    """
    shape: torch.Size = getattr(parameter, _WHOLE, parameter.shape)
    return len(shape) >= 2 and shape.numel() >= LEAST_PACKED


class SmaqStorage:
    """SmaQ blocks of ``unit`` numbers, at most ``smaqstep.MOST_BLOCK``, each read, stepped and written at once."""

    def __init__(self, encoding: Smaq) -> None:
        self.form, self.unit = encoding.form, encoding.block
        self._nearest = encoding.model_copy(update={"rounding": "nearest"})

    def packed_bytes(self, count: int, first: int = 0) -> int:
        """Return the bytes of ``count`` numbers: 6.5 bits each in the usual form."""
        return self.form.packed_bytes(count)

    def zeros(self, count: int, device: torch.device, first: int = 0) -> Tensor:
        """Return zero bytes, which are zeros."""
        return torch.zeros(self.packed_bytes(count), dtype=torch.uint8, device=device)

    def pack(self, values: Tensor, first: int = 0) -> Tensor:
        """Return the nearest codes: state is packed once, so rounding need not be right on average."""
        return self._nearest.encode(values, torch.zeros((), dtype=torch.int64, device=values.device))[0]

    def unpack(self, packed: Tensor, count: int, first: int = 0) -> Tensor:
        """Return the decoded values."""
        return self._nearest.decode((packed,), (count,), torch.float32)

    def in_units(self, packed: Tensor, count: int, first: int = 0) -> Tensor:
        """Return the bytes of whole blocks in rows, which share their memory: uint8 ``(count / unit, bytes)``."""
        return packed.view(-1, self.form.block_bytes)

    def from_units(self, units: Tensor, first: int = 0) -> Tensor:
        """Return the bytes that :meth:`in_units` was given."""
        return units.reshape(-1)

    def adam(
        self, param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule, first: int = 0
    ) -> None:
        """Step by Adam or AdamW."""
        smaqstep.adam_(param, grad, means, roots, seed, rule, self.form, first)

    def sgd(self, param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule, first: int = 0) -> None:
        """Step by SGD with momentum."""
        smaqstep.sgd_(param, grad, buffers, seed, rule, self.form, first)


Storage = ChunkedStorage | SmaqStorage
"""How n numbers of state are stored in one vector of bytes, and stepped there."""


@functools.cache
def storage_of(spec: str) -> Storage:
    """Return the storage that a specification of an encoding names, such as ``smaq`` or ``int:6``.

    Raises:
        UsageError: There is no such encoding, or state cannot be stored in it.
    """
    encoding = encodings.build(spec)
    if isinstance(encoding, Smaq) and encoding.rounding == "stochastic" and encoding.block <= smaqstep.MOST_BLOCK:
        return SmaqStorage(encoding)
    if not encoding.stored:
        raise UsageError(f"optimizer state as {spec!r}: this format only simulates, and saves no bytes; take smaq")
    if not encoding.fixed_rate:
        raise UsageError(
            f"optimizer state as {spec!r}: its bytes depend on the values, so state cannot be replaced in place; "
            "take smaq, int:6 or bf16"
        )
    return ChunkedStorage(encoding)
