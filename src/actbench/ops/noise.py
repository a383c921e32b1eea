"""Random words from a counter, noise for rounding, and fresh seeds that follow ``torch.manual_seed``.

Word i of a seed is a hash of the seed and i, so there is no state, and any part can be made alone. The hash is
splitmix64 (Steele, Lea, Flood 2014): ``finalize(state + (i + 1) * GOLDEN)``. The state is the finalized seed, not the
seed itself: else the words of two seeds that differ by a multiple of ``GOLDEN`` would overlap. This file is the
reference, in torch on any device: int64 stands for uint64, products wrap around, and a logical shift is an arithmetic
shift with the copies of the sign masked.

Rounding needs fewer bits for more elements, and 64-bit products are dear on a GPU. So its noise is 15 bits an element,
in sequences of 32 numbers: a hash of the state and of the sequence's number, in 32 bits, gives a word and an odd
increment, and number k is the upper 15 bits of the word after k + 1 steps ``word = word * STEP + increment``. This is a
linear congruential generator with a multiplier of Steele and Vigna (2021); the increments keep any two sequences
apart. Elements come in units of 32 * width, whose ``width`` sequences take turns every 8 elements, as the lanes of a
warp do that read a unit in vectors of 8.

A fresh seed takes no number from torch's generator: dropout on the CPU draws from that, and a scheme would change the
dropout masks of the model that it is compared with. A separate generator would not see ``torch.manual_seed``, nor be
saved, restored and forked with torch's. So a seed is a hash of the default generator's state, and each draw changes a
part of the state on which no number depends: in the 624 words of a Mersenne twister (Matsumoto, Nishimura 1998), the
low 31 bits of the first word never enter the next 624 words, and the generator uses up the first word first.

A forward pass through a converted model draws once, when it begins, and gives its sites the words of that seed, since a
draw takes ten times as long as a word. So does a backward pass, when something in it first asks for a seed.

Checkpointing sets the generator back before it reruns a block, so that dropout draws the masks of the first run, and
restores it afterwards. Seeds must not repeat: their errors would no longer be independent. So the draw of a backward
pass is another hash of the state, and the generator's state changes when the pass ends. One case still repeats: if
torch's own checkpointing recomputes a retained graph a second time, the second time gets the seeds of the first;
``+checkpoint`` separates these too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.autograd import Variable

from actbench.errors import KernelError
from actbench.ops.library import EVERYWHERE, HOST_NUMBER, RANDOM, define, faked

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1

NUMBERS = 32
"""Numbers of a sequence of noise."""

RUN = 8
"""Elements that take neighbouring numbers of one sequence."""

NOISE_BITS = 15
"""Bits of a number of noise."""

HASHES = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Odd multipliers of the hash that begins a sequence: the golden ratio's, and those of murmur3 (Appleby 2011)."""

STEP = 0xADB4A92D
_HALF_WORD = (1 << 32) - 1

POWERS = tuple(pow(STEP, k, 1 << 32) for k in range(1, NUMBERS + 1))
"""By what word and increment are multiplied and added up to give the word after k + 1 steps: these, and the next."""

SUMS = tuple(sum(pow(STEP, i, 1 << 32) for i in range(k)) & _HALF_WORD for k in range(1, NUMBERS + 1))


def mixed(seed: int) -> int:
    """Return the state of a seed, 0 to 2**64 - 1, from which its words are made."""
    word = (seed + GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * FIRST) & _WORD
    word = ((word ^ (word >> 27)) * SECOND) & _WORD
    return word ^ (word >> 31)


def state_of(seed: int | Tensor) -> np.uint64:
    """Return the state of a seed for a kernel; the seed may be a 0-d int64 tensor on the CPU."""
    return np.uint64(mixed(int(seed)))


def check_seed(seed: Tensor) -> None:
    """Raise a ValueError unless the seed is a 0-d int64 tensor on the CPU."""
    if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device.type != "cpu":
        raise ValueError(f"the seed must be a 0-d int64 tensor on the CPU, found {seed.dtype} {tuple(seed.shape)}")


def unmixed(state: int) -> int:
    """Return the seed, 0 to 2**64 - 1, whose words a state is that of: the inverse of :func:`mixed`."""
    word = state ^ (state >> 31) ^ (state >> 62)
    word = (word * pow(SECOND, -1, 1 << 64)) & _WORD
    word = word ^ (word >> 27) ^ (word >> 54)
    word = (word * pow(FIRST, -1, 1 << 64)) & _WORD
    word = word ^ (word >> 30) ^ (word >> 60)
    return (word - GOLDEN) & _WORD


def advanced(seed: int, words: int) -> int:
    """Return the seed, an int64, whose words from index 0 on are those of ``seed`` from index ``words`` on."""
    return signed(unmixed((mixed(seed) + words * GOLDEN) & _WORD)) if words else signed(seed)


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


def numbers(seed: int, first: int, units: int, width: int, device: torch.device) -> Tensor:
    """Return the noise of the elements of ``units`` units from unit ``first`` on: int64 ``(units, 32 * width)``.

    Each is 0 to 2**15 - 1. Unit u has sequences ``u * width .. (u + 1) * width - 1``; see the top of this file.
    """
    state = mixed(seed)
    low, high = state & _HALF_WORD, state >> 32
    word = torch.arange(first * width, (first + units) * width, dtype=torch.int64, device=device)
    word = (word * HASHES[0] + low) & _HALF_WORD
    word = ((word ^ (word >> 16)) * HASHES[1] + high) & _HALF_WORD
    word = word ^ (word >> 13)
    increment = word | 1
    word = (word * HASHES[2]) & _HALF_WORD
    word = word ^ (word >> 16)

    powers, sums = (
        torch.tensor(table, dtype=torch.int64, device=device).view(1, NUMBERS // RUN, 1, RUN)
        for table in (POWERS, SUMS)
    )
    word, increment = (part.view(units, 1, width, 1) for part in (word, increment))
    stepped = (word * powers + increment * sums) & _HALF_WORD  # a product that wraps around keeps its low 32 bits
    return (stepped >> (32 - NOISE_BITS)).reshape(units, NUMBERS * width)


def from_sequence(seed: int, first: int) -> int:
    """Return the seed, an int64, whose sequences from 0 on are those of ``seed`` from sequence ``first`` on."""
    state = mixed(seed)
    low = (state + first * HASHES[0]) & _HALF_WORD
    return signed(unmixed(state & ~_HALF_WORD | low))


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

    This is an operator, so that compilers trace it and never see the number in a seed (a 0-d int64 tensor on the CPU).
    Rows and fractions are made from the words by torch's own operators, so they need no kernel.

    Raises:
        ValueError: The seed is not as above, or a number is negative.
    """
    _check(seed, first, count)
    return torch.empty(count, dtype=torch.int64, device=device)


# The generator's state as 64-bit words: initial seed, flags, position in the block, then the 624 words of the block.
_SEED, _POSITION, _BLOCK = 0, 2, 3
_UNUSED = (1 << 31) - 1


def draw(generator: torch.Generator) -> int:
    """Return a fresh 64-bit seed from the state of a CPU generator, without a change of its numbers."""
    state = generator.get_state()
    words = state.numpy()[: (_BLOCK + 624) * 8].view(np.uint64)
    seed = _hashed(words)
    _move_on(words)
    generator.set_state(state)
    return seed


def _hashed(words: NDArray[np.uint64]) -> int:
    """Return a hash of the part of a state that every draw and every number changes."""
    seed = 0
    for index in (_SEED, _POSITION, _BLOCK, _BLOCK + 1, _BLOCK + 2):
        seed = mixed(seed ^ int(words[index]))
    return seed


def _move_on(words: NDArray[np.uint64]) -> None:
    """Change a part of a state on which no number depends."""
    first = int(words[_BLOCK])
    words[_BLOCK] = (first & ~_UNUSED) | ((first + 1) & _UNUSED)


class _Seeds:
    """The seeds of a pass: the words of one seed, in order, each a 0-d int64 tensor on the CPU."""

    def __init__(self, seed: int) -> None:
        self._seed, self._made = seed, 0
        self._left: Iterator[Tensor] = iter(())

    def next(self) -> Tensor:
        """Return the next seed; they are made many at once, as a tensor of each alone would take as long as a draw."""
        seed = next(self._left, None)
        if seed is None:
            self._left = iter(words(self._seed, self._made, _AT_ONCE, _CPU).unbind())
            self._made += _AT_ONCE
            seed = next(self._left)
        return seed


_CPU, _AT_ONCE = torch.device("cpu"), 64
_of_pass: ContextVar[_Seeds | None] = ContextVar("_of_pass", default=None)


@contextmanager
def drawn_once() -> Iterator[None]:
    """Draw once for all seeds that are asked for inside the with-block, by this thread: in a forward pass.

    The draw is at the beginning: one inside a block with a forked generator would be undone with it, and come again in
    the next pass. Inside of another such block it goes on with the seeds of that one. On fake tensors nothing is drawn.
    """
    if _of_pass.get() is not None or faked():
        yield
        return
    with torch._C._DisableTorchDispatch():  # who measures memory need not see the state of the generator
        seeds = _draws.of_forward_pass()
    token = _of_pass.set(seeds)
    try:
        yield
    finally:
        _of_pass.reset(token)


class _Draws:
    """Draws seeds from torch's generator that never repeat, in forward passes and in backward passes.

    A re-entrant backward pass runs inside another; they have the seeds of one draw until all that asked have ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: dict[int, int] = {}  # each backward pass with the thread that first asked in it
        self._backward: _Seeds | None = None
        self._place: tuple[Any, int] | None = None

    @property
    def rank(self) -> int:
        """By which number this process draws other seeds than others that were seeded alike; 0 for one alone."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0
        known = self._place is not None and self._place[0] is distributed.group.WORLD
        return self._place[1] if known and self._place else distributed.get_rank()

    @rank.setter
    def rank(self, rank: int) -> None:
        self._place = distributed.group.WORLD, rank  # of another process group nothing is said

    def seed(self) -> Tensor:
        """Return a seed."""
        forward = _of_pass.get()
        if forward is not None:
            return forward.next()
        running: int = torch._C._current_graph_task_id()
        if running < 0:
            return torch.tensor(signed(self._drawn()), dtype=torch.int64, device=_CPU)
        with self._lock:
            if running not in self._passes:
                self._passes[running] = threading.get_ident()
                Variable._execution_engine.queue_callback(functools.partial(self._end, running))
            if self._backward is None:
                self._backward = self._of_backward_pass()
            return self._backward.next()

    def of_forward_pass(self) -> _Seeds:
        """Draw the seed of a forward pass; one that runs in a backward pass, as recomputed blocks do, asks that."""
        in_backward = torch._C._current_graph_task_id() >= 0
        return _Seeds(int(self.seed()) if in_backward else self._drawn())

    def _drawn(self) -> int:
        with self._lock:
            self._forget_failed()
            return self._for_rank(draw(torch.default_generator))

    def _of_backward_pass(self) -> _Seeds:
        """Draw without a change of the generator, which checkpointing may have set back."""
        state = torch.default_generator.get_state().numpy()[: (_BLOCK + 624) * 8].view(np.uint64)
        return _Seeds(self._for_rank(mixed(_hashed(state) ^ _BACKWARD)))

    def _for_rank(self, seed: int) -> int:
        """Return another seed on each rank: ranks are often seeded alike, and their errors must not be.

        Rank 0 has the seeds of a process that is alone.
        """
        rank = self.rank
        return mixed(seed ^ rank) if rank else seed

    def _forget_failed(self) -> None:
        """Forget the passes of this thread, which now runs none: a failed pass does not report its end."""
        own = threading.get_ident()
        self._passes = {running: thread for running, thread in self._passes.items() if thread != own}
        if not self._passes:
            self._backward = None

    def _end(self, over: int) -> None:
        """Change the generator's state after a pass that drew, so that the next step gets other seeds."""
        with self._lock:
            self._passes.pop(over, None)
            if not self._passes:
                self._backward = None
            draw(torch.default_generator)


_BACKWARD = mixed(1)  # what makes the draw of a backward pass another than that of a forward pass
_draws = _Draws()


def draw_as(rank: int) -> None:
    """Let this process draw the seeds of a process of that rank, in the process group of now.

    Processes that compute the same, as those that share layers do around these, must draw alike. It holds for all that
    the process draws, until the process group ends.
    """
    _draws.rank = rank


def diverge(generator: torch.Generator, branch: int) -> None:
    """Make later draws give other seeds on each branch, without a change of the generator's numbers.

    Branch 0 changes nothing. Other branches change the generator's record of its initial seed, on which no number
    depends; ``torch.manual_seed`` undoes the change.
    """
    if branch:
        state = generator.get_state()
        words = state.numpy()[: _BLOCK * 8].view(np.uint64)
        words[_SEED] = mixed(int(words[_SEED]) ^ mixed(branch))
        generator.set_state(state)


@functools.cache
def _check_layout() -> None:
    """Raise a KernelError unless the state of a separate generator has the layout that this file assumes."""
    plain, drawn = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    different = draw(drawn) != draw(drawn)
    same = torch.equal(torch.rand(1300, generator=plain), torch.rand(1300, generator=drawn))
    if not (different and same):
        raise KernelError(
            f"seeds cannot be drawn: the state of torch {torch.__version__}'s CPU generator is not laid out as in the "
            "versions actbench knows; use a version it was tested with (see 'actbench doctor')"
        )


def _refuse_capture() -> None:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialized and torch.cuda.is_current_stream_capturing():
        raise KernelError(
            "a seed is drawn while a CUDA graph is captured, and all replays of the graph would reuse it; "
            "leave operators that draw seeds out of the graph"
        )


def _fresh_seed() -> Tensor:
    _check_layout()
    _refuse_capture()
    return _draws.seed()


def _own_seed() -> Tensor:
    return _fresh_seed().clone()  # a seed may be saved, and those of a pass lie together


@define("fresh_seed() -> Tensor", {EVERYWHERE: _own_seed}, tags=RANDOM)
def fresh_seed() -> Tensor:
    """Return a fresh seed: a 0-d int64 CPU tensor, any of its 2**64 values.

    A compiler may draw again in the backward pass, so one operator must draw the seed and use it.

    Raises:
        KernelError: The state of torch's generator has an unknown layout, or a CUDA graph is being captured.
    """
    return torch.empty((), dtype=torch.int64, device="cpu")


def seed_at_once() -> Tensor:
    """Return a fresh seed that is not saved, outside of graphs that compilers trace.

    It is drawn without the operator, which takes most of the time, unless something sees operators.
    """
    return fresh_seed() if torch._C._len_torch_dispatch_stack() else _fresh_seed()
