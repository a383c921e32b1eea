"""Random words from a counter: word i of a seed is a hash of both, so there is no state and any part can be made alone.

The hash is splitmix64 (Steele, Lea, Flood 2014): ``finalize(state + (i + 1) * GOLDEN)``. The state is the finalized
seed and not the seed itself, since the words of seeds that differ by a multiple of ``GOLDEN`` would overlap.

This is the reference, in torch on any device. int64 stands for uint64: products wrap around, and a logical shift is an
arithmetic one with the sign's copies masked away.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops.library import HOST_NUMBER, define

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def mixed(seed: int) -> int:
    """Return the state, 0 to 2**64 - 1, whose words a seed stands for."""
    word = (seed + GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * FIRST) & _WORD
    word = ((word ^ (word >> 27)) * SECOND) & _WORD
    return word ^ (word >> 31)


def state_of(seed: int | Tensor) -> np.uint64:
    """Return that state for a kernel; the seed may be a 0-d int64 tensor on the CPU."""
    return np.uint64(mixed(int(seed)))


def signed(word: int) -> int:
    """Return the int64 with the bits of ``word``."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def words(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return ``count`` random words of a seed from index ``first`` on: int64, all 64 bits random."""
    word = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    word = word * signed(GOLDEN) + signed(mixed(seed))
    word = (word ^ _shifted(word, 30)) * signed(FIRST)
    word = (word ^ _shifted(word, 27)) * signed(SECOND)
    return word ^ _shifted(word, 31)


def lanes(seed: int, first: int, count: int, bits: int, device: torch.device) -> Tensor:
    """Return ``count`` random numbers of ``bits`` bits each from index ``first`` on, cut from the words low bits first.

    They are int64 ``(count,)``; ``bits`` is 1, 2, 4, 8, 16 or 32.
    """
    per_word = 64 // bits
    first_word, skipped = divmod(first, per_word)
    needed = -(-(skipped + count) // per_word)
    shifts = torch.arange(0, 64, bits, dtype=torch.int64, device=device)
    cut = (words(seed, first_word, needed, device)[:, None] >> shifts) & ((1 << bits) - 1)
    return cut.flatten()[skipped : skipped + count]


def _shifted(word: Tensor, bits: int) -> Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _check(seed: Tensor, first: int, count: int) -> None:
    torch._check_value(seed.dtype == torch.int64 and seed.dim() == 0, lambda: "the seed must be a 0-d int64 tensor")
    torch._check_value(first >= 0 and count >= 0, lambda: "the first word and their count are not negative")


def _words(seed: Tensor, first: int, count: int, device: torch.device) -> Tensor:
    _check(seed, first, count)
    return words(int(seed.item()), first, count, device)


@define(
    "random_words(Tensor seed, SymInt first, SymInt count, Device device) -> Tensor",
    {"CPU": _words},  # where the seed is
    tags=HOST_NUMBER,
)
def random_words(seed: Tensor, first: int, count: int, device: torch.device) -> Tensor:
    """Return words ``first .. first + count - 1`` of a seed, the same on every device: int64 ``(count,)``.

    As an operator, so that compilers trace it and never see the number that a seed (a 0-d int64 tensor on the CPU)
    holds. What is drawn from the words (rows, fractions) is made with torch's own operators, so it needs no kernel.

    Raises:
        ValueError: The seed is not as above, or a number is negative.
    """
    _check(seed, first, count)
    return torch.empty(count, dtype=torch.int64, device=device)
