"""How the state of an optimizer is stored."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.codecs import encodings
from actbench.codecs.encodings import Encoding, Smaq
from actbench.errors import UsageError
from actbench.ops import noise, smaqstep
from actbench.ops.smaqstep import rules as steprules
from actbench.ops.smaqstep.rules import AdamRule, SgdRule

CHUNK = 1 << 18
"""Elements that are float32 at a time; temporary memory is a dozen times their 1 MiB. Groups and blocks divide it."""

_Chunk = tuple[int, int, int]
"""Its number, its first element and its end."""


class ChunkedStorage:
    """The parts of each chunk as bytes, chunk behind chunk, of an encoding of fixed bytes that really stores.

    In :meth:`adam` and :meth:`sgd`, here and in :class:`SmaqStorage`, parameter and gradient are contiguous vectors of
    float32, float16 or bfloat16, and the seed of their noise is another one at each step and for each parameter.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self._chunk_bytes = encoding.packed_bytes((CHUNK,), torch.float32)

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` numbers."""
        whole, left = divmod(count, CHUNK)
        return whole * self._chunk_bytes + (self.encoding.packed_bytes((left,), torch.float32) if left else 0)

    def zeros(self, count: int, device: torch.device) -> Tensor:
        """Return the bytes of ``count`` zeros, uint8."""
        packed = torch.empty(self.packed_bytes(count), dtype=torch.uint8, device=device)
        for number, start, end in _stepped(packed, count):
            self._write(packed, number, torch.zeros(end - start, device=device), seed=0)
        return packed

    def pack(self, values: Tensor) -> Tensor:
        """Return the bytes of float32 ``(n,)``."""
        packed = torch.empty(self.packed_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        for number, start, end in _chunks(values.numel()):
            self._write(packed, number, values[start:end], _seed(0, 0, number))
        return packed

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """Return float32 ``(count,)``."""
        return torch.cat([self._read(packed, number, end - start) for number, start, end in _chunks(count)])

    def adam(self, param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule) -> None:
        """Step a parameter by Adam or AdamW, and its packed first moment and root of the second, in place."""
        for chunk in _stepped(param, param.numel()):
            self._adam(chunk, param, grad, means, roots, seed, rule)

    def sgd(self, param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule) -> None:
        """Step a parameter by SGD with momentum, and its packed buffer, in place."""
        for chunk in _stepped(param, param.numel()):
            self._sgd(chunk, param, grad, buffers, seed, rule)

    def _adam(
        self, chunk: _Chunk, param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule
    ) -> None:
        number, start, end = chunk
        m, s = self._read(means, number, end - start), self._read_roots(roots, number, end - start)
        p, m, s = steprules.adam(param[start:end].float(), grad[start:end].float(), m, s, rule)
        param[start:end] = p
        self._write(means, number, m, _seed(seed, 0, number))
        self._write(roots, number, s, _seed(seed, 1, number))

    def _sgd(self, chunk: _Chunk, param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule) -> None:
        number, start, end = chunk
        b = self._read(buffers, number, end - start)
        p, b = steprules.sgd(param[start:end].float(), grad[start:end].float(), b, rule)
        param[start:end] = p
        self._write(buffers, number, b, _seed(seed, 0, number))

    def _write(self, packed: Tensor, number: int, values: Tensor, seed: int) -> None:
        parts = self.encoding.encode(values, torch.tensor(seed, device="cpu"))
        data = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        packed[number * self._chunk_bytes :][: data.numel()] = data

    def _read(self, packed: Tensor, number: int, count: int) -> Tensor:
        return self.encoding.decode(self._parts(packed, number, count), (count,), torch.float32)

    def _read_roots(self, packed: Tensor, number: int, count: int) -> Tensor:
        """Return numbers that are divided by: none is nearer to zero than half a step, as in SmaQ's own operator."""
        parts = self._parts(packed, number, count)
        roots, least = self.encoding.decode(parts, (count,), torch.float32), self.encoding.half_steps(parts, count)
        return roots.clamp_(min=0) if least is None else torch.maximum(roots, least)

    def _parts(self, packed: Tensor, number: int, count: int) -> tuple[Tensor, ...]:
        left, parts = packed[number * self._chunk_bytes :], []
        for dtype, shape in _parts_of(self.encoding.spec, count):
            size = math.prod(shape) * dtype.itemsize
            parts.append(left[:size].clone().view(dtype).view(shape))  # cloned, because numbers must be aligned
            left = left[size:]
        return tuple(parts)


def _chunks(count: int) -> Iterator[_Chunk]:
    """Yield the number, the first element and the end of each chunk."""
    for number, start in enumerate(range(0, count, CHUNK)):
        yield number, start, min(start + CHUNK, count)


def _stepped(written: Tensor, count: int) -> Iterator[_Chunk]:
    """Yield the chunks that are written into a tensor one after the other; of a fake one the first, as large as any."""
    return itertools.islice(_chunks(count), 1 if isinstance(written, FakeTensor) else None)


def _seed(seed: int, moment: int, chunk: int) -> int:
    return noise.signed(noise.mixed(noise.mixed(seed) ^ (2 * chunk + moment)))


@functools.lru_cache(maxsize=1024)
def _parts_of(spec: str, count: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Return type and shape of each part that ``count`` numbers are stored as."""
    parts = encodings.build(spec).encode(torch.zeros(count, device="cpu"), torch.tensor(0, device="cpu"))
    return tuple((part.dtype, tuple(part.shape)) for part in parts)


LEAST_PACKED = 4096
"""Elements of the smallest parameter whose state is packed."""


def is_packed(parameter: Tensor) -> bool:
    """Return whether the state of a parameter is packed: that of norms, biases and small ones stays float32."""
    return parameter.dim() >= 2 and parameter.numel() >= LEAST_PACKED


class SmaqStorage:
    """SmaQ blocks of at most ``smaqstep.MOST_BLOCK``, each read, stepped and written in one pass."""

    def __init__(self, encoding: Smaq) -> None:
        self.form = encoding.form
        self._nearest = encoding.model_copy(update={"rounding": "nearest"})

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` numbers: 6.5 bits each in the usual form."""
        return self.form.packed_bytes(count)

    def zeros(self, count: int, device: torch.device) -> Tensor:
        """Return zero bytes, which are zeros."""
        return torch.zeros(self.packed_bytes(count), dtype=torch.uint8, device=device)

    def pack(self, values: Tensor) -> Tensor:
        """Return the nearest codes: this is done once, so that nothing has to be right in the mean."""
        return self._nearest.encode(values, torch.tensor(0, device="cpu"))[0]

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """Return what the codes stand for."""
        return self._nearest.decode((packed,), (count,), torch.float32)

    def adam(self, param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule) -> None:
        """Step by Adam or AdamW."""
        smaqstep.adam_(param, grad, means, roots, seed, rule, self.form)

    def sgd(self, param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule) -> None:
        """Step by SGD with momentum."""
        smaqstep.sgd_(param, grad, buffers, seed, rule, self.form)


Storage = ChunkedStorage | SmaqStorage
"""How n numbers of state are stored in one vector of bytes, and stepped there."""


@functools.cache
def storage_of(spec: str) -> Storage:
    """Return the storage that a specification of an encoding names, such as ``smaq`` or ``int:6``.

    Raises:
        UsageError: There is no such encoding, or it is none that state can be kept in.
    """
    encoding = encodings.build(spec)
    if isinstance(encoding, Smaq) and encoding.rounding == "stochastic" and encoding.block <= smaqstep.MOST_BLOCK:
        return SmaqStorage(encoding)
    _check(encoding, spec)
    return ChunkedStorage(encoding)


def _check(encoding: Encoding, spec: str) -> None:
    if not encoding.stored:
        raise UsageError(f"optimizer state as {spec!r}: it only simulates, and would save nothing; smaq is stored")
    if not encoding.fixed_rate:
        raise UsageError(
            f"optimizer state as {spec!r}: its bytes depend on the values, so state cannot be replaced in place; "
            "take smaq, int:6 or bf16"
        )
