"""How state is stored: what every encoding does for an optimizer, and SmaQ, which does it in one pass."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from actbench.codecs import encodings
from actbench.codecs.encodings import Encoding, Smaq
from actbench.errors import UsageError
from actbench.ops import smaqstep
from actbench.ops.steprules import AdamRule, SgdRule
from actbench.optim.chunks import ChunkedStorage

LEAST_PACKED = 4096
"""Elements of the smallest parameter whose state is packed."""


def is_packed(parameter: Tensor) -> bool:
    """Return whether the state of a parameter is packed: that of norms, biases and small ones stays float32."""
    return parameter.dim() >= 2 and parameter.numel() >= LEAST_PACKED


class Storage(Protocol):
    """How n numbers of state are stored in one vector of bytes, and stepped there.

    In :meth:`adam` and :meth:`sgd` parameter and gradient are contiguous vectors of float32, float16 or bfloat16, and
    the seed of their noise is another one at each step and for each parameter.
    """

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` numbers."""
        ...

    def zeros(self, count: int, device: torch.device) -> Tensor:
        """Return the bytes of ``count`` zeros, uint8."""
        ...

    def pack(self, values: Tensor) -> Tensor:
        """Return the bytes of float32 ``(n,)``."""
        ...

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """Return float32 ``(count,)``."""
        ...

    def adam(self, param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, seed: int, rule: AdamRule) -> None:
        """Step a parameter by Adam or AdamW, and its packed first moment and root of the second, in place."""
        ...

    def sgd(self, param: Tensor, grad: Tensor, buffers: Tensor, seed: int, rule: SgdRule) -> None:
        """Step a parameter by SGD with momentum, and its packed buffer, in place."""
        ...


class SmaqStorage:
    """SmaQ blocks, each read, stepped and written in one pass.

    Args:
        encoding: Which SmaQ; blocks of at most ``smaqstep.MOST_BLOCK``, rounded stochastically.
    """

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
