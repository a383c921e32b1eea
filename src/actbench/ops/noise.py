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

Fresh seeds are consecutive numbers, as a kernel hashes a seed before it uses it. The next number is held in a tensor on
each device, and moved on there: so a step draws once, nothing waits for the device, and a step that was captured as a
CUDA graph draws other seeds at each replay. Where the numbers begin follows from the state of torch's default
generator: they begin anew in the first forward pass after ``torch.manual_seed``.

No number is taken from the generator: dropout on the CPU draws from that, and a scheme would change the dropout masks
of the model that it is compared with. To know without a look at its state that it was seeded, seeds that begin leave a
mark there, as its record of the initial seed, on which no number depends. They also change the state otherwise, so that
they never begin at the same number twice: in the 624 words of a Mersenne twister (Matsumoto, Nishimura 1998), the low
31 bits of the first word never enter the next 624 words, and the generator uses up the first word first.

A state that was saved behind the mark and is set again, as checkpointing does before it reruns a block, brings no seed
again: numbers go on.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import KernelError
from actbench.ops.library import EVERYWHERE, RANDOM, define, faked, traced

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


def state_of(seed: int) -> np.uint64:
    """Return the state of a seed for a kernel that gets a number."""
    return np.uint64(mixed(seed))


def check_seed(seed: Tensor, device: torch.device) -> None:
    """Raise a ValueError unless the seed is a 0-d int64 tensor on the device, where kernels read it."""
    if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device != device:
        found = f"{seed.dtype} {tuple(seed.shape)} on {seed.device}"
        raise ValueError(f"the seed must be a 0-d int64 tensor on {device}, found {found}")


def unmixed(state: int) -> int:
    """Return the seed, 0 to 2**64 - 1, whose words a state is that of: the inverse of :func:`mixed`."""
    # a number and itself shifted, by xor, are undone by all multiples of the shift below 64
    word = state ^ (state >> 31) ^ (state >> 62)
    # odd factors have inverses modulo 2**64
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


def words(seed: int | Tensor, first: int, count: int, device: torch.device) -> Tensor:
    """Return ``count`` random words of a seed from index ``first`` on: int64, all 64 bits random.

    The seed is a number, or a tensor on the device, whose value the host never reads.
    """
    state = _state(seed)
    # in a list, which the callee empties, so that it frees them as it goes on: where torch.compile has replaced the
    # evaluation of frames (PEP 523), the caller's stack holds what it passes
    return _finalized(
        [torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device).mul_(signed(GOLDEN)).add_(state)]
    )


def _state(seed: int | Tensor) -> int | Tensor:
    """Return the state of a seed as an int64."""
    return _finalized([seed + signed(GOLDEN)]) if isinstance(seed, Tensor) else signed(mixed(seed))


def _finalized(held: list[Tensor]) -> Tensor:
    word = held.pop()
    word = (word ^ _shifted(word, 30)) * signed(FIRST)
    word = (word ^ _shifted(word, 27)) * signed(SECOND)
    return word ^ _shifted(word, 31)


def lanes(seed: int | Tensor, first: int, count: int, bits: int, device: torch.device) -> Tensor:
    """Return ``count`` random numbers of ``bits`` bits each from index ``first`` on, cut from the words low bits first.

    They are int64 ``(count,)``; ``bits`` is 1, 2, 4, 8, 16 or 32.
    """
    per_word = 64 // bits
    first_word, skipped = divmod(first, per_word)
    needed = -(-(skipped + count) // per_word)
    shifts = torch.arange(0, 64, bits, dtype=torch.int64, device=device)
    cut = (words(seed, first_word, needed, device)[:, None] >> shifts) & ((1 << bits) - 1)
    return cut.flatten()[skipped : skipped + count]


def numbers(seed: int | Tensor, first: int, units: int, width: int, device: torch.device) -> Tensor:
    """Return the noise of the elements of ``units`` units from unit ``first`` on: int64 ``(units, 32 * width)``.

    Each is 0 to 2**15 - 1. Unit u has sequences ``u * width .. (u + 1) * width - 1``; see the top of this file.
    """
    state = _state(seed)
    low, high = state & _HALF_WORD, (state >> 32) & _HALF_WORD
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


def _words(seed: Tensor, first: int, count: int) -> Tensor:
    _check(seed, first, count)
    return words(seed, first, count, seed.device)


@define("random_words(Tensor seed, SymInt first, SymInt count) -> Tensor", {EVERYWHERE: _words})
def random_words(seed: Tensor, first: int, count: int) -> Tensor:
    """Return words ``first .. first + count - 1`` of a seed, the same on every device: int64 ``(count,)``.

    They are made where the seed is, a 0-d int64 tensor. This is an operator, so that a compiler sees one node. Rows and
    fractions are made from the words by torch's own operators, so they need no kernel.

    Raises:
        ValueError: The seed is not as above, or a number is negative.
    """
    _check(seed, first, count)
    return seed.new_empty(count)


# The generator's state as 64-bit words: initial seed, flags, position in the block, then the 624 words of the block.
_SEED, _POSITION, _BLOCK = 0, 2, 3
_UNUSED = (1 << 31) - 1


def _words_of(state: Tensor) -> NDArray[np.uint64]:
    """Return the words of a generator's state, which change it."""
    return state.numpy()[: (_BLOCK + 624) * 8].view(np.uint64)


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
    """The fresh seeds of this process: consecutive numbers on each device.

    Those of the first device that draws follow from the generator alone, so that equally seeded processes, each
    with a device of its own, draw the same numbers if they have the same rank.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next: dict[torch.device, Tensor] = {}  # int64, 0-d; graphs that were captured refer to them
        self._start = 0
        self._begun: list[torch.device] = []  # the devices whose numbers follow from the start
        self._follows: tuple[int, int] | None = None  # the mark in the generator, and the rank
        self._left: dict[torch.device, list[Tensor]] = {}  # for those that draw outside of a pass, the next one last
        self._place: tuple[Any, int] | None = None

    @property
    def rank(self) -> int:
        """By which number this process draws other seeds than others that were seeded equally; 0 for one alone."""
        if not (_HAS_GROUPS and distributed.is_initialized()):
            return 0
        known = self._place is not None and self._place[0] is distributed.group.WORLD
        return self._place[1] if known and self._place else distributed.get_rank()

    @rank.setter
    def rank(self, rank: int) -> None:
        self._place = distributed.group.WORLD, rank  # of another process group nothing is said

    def begin(self) -> None:
        """Let the seeds begin anew if torch's generator was seeded since they began.

        They go on in a backward pass, where checkpointing has set the generator back, and while a CUDA graph is
        captured: a beginning would be captured with it, and come again at each replay.
        """
        if (torch.default_generator.initial_seed(), self.rank) == self._follows or captures():
            return
        if self._follows is not None and torch._C._current_graph_task_id() >= 0:
            return
        _check_layout()
        with self._lock:
            seed, mark = mark_seeded(torch.default_generator)
            rank = self.rank
            # Ranks are often seeded equally, and their errors must not be; rank 0 has the seeds of a process alone.
            self._start, self._follows = mixed(seed ^ rank) if rank else seed, (mark, rank)
            self._begun.clear()
            self._left.clear()

    def take(self, device: torch.device, count: int) -> Tensor:
        """Return seeds that are given out once, int64 (count,) on the device."""
        # who measures memory need not see these few bytes; a mode of fake tensors would make them fake
        with self._lock, torch._C._DisableTorchDispatch():
            following = self._following(device)
            seeds = following + torch.arange(count, dtype=torch.int64, device=device)
            following.add_(count)
        return seeds

    def seed(self, device: torch.device) -> Tensor:
        """Return a seed outside of a pass."""
        self.begin()
        if device.type == "cuda" and captures():  # what was taken before the capture would come again at each replay
            return self.take(device, 1).view(())
        with self._lock:
            left = self._left.setdefault(device, [])
            if not left:
                left += reversed(self._batch(device))
            return left.pop()

    def several(self, device: torch.device) -> Iterator[Tensor]:
        """Return seeds without end; an iterator that is no generator takes a third of the time of each."""
        return itertools.chain.from_iterable(iter(functools.partial(self._batch, device), None))

    def _batch(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return seeds that are made many at once, as each operator takes the host's time."""
        seeds = self.take(device, _AT_ONCE)
        # as in take: seeds are real under modes of fake tensors, too
        with torch._C._DisableTorchDispatch():
            return seeds.unbind()

    def _following(self, device: torch.device) -> Tensor:
        """Return the next seed of a device."""
        following = self._next.get(device)
        if following is not None and (device in self._begun or (device.type == "cuda" and captures())):
            return following
        if device.type == "cuda" and captures():
            raise KernelError(
                "the first seed is drawn while a CUDA graph is captured, and all replays of the graph would begin with "
                "it; run a step before the capture"
            )
        first = signed(mixed(self._start ^ len(self._begun)) if self._begun else self._start)
        if following is None:
            # a tensor that is made in inference mode could not be moved on outside of it
            with torch.inference_mode(False):
                following = self._next[device] = torch.full((), first, dtype=torch.int64, device=device)
        else:
            following.fill_(first)
        self._begun.append(device)
        return following

    def state(self) -> dict[str, Tensor]:
        """Return what :meth:`restore` takes, by names; this waits for the devices."""
        if self._follows is None:
            return {}
        names = {"follows": torch.tensor([signed(word) for word in (*self._follows, self._start)])}
        names |= {f"left.{device}": torch.stack(left).cpu() for device, left in self._left.items() if left}
        # cpu() of a number on the CPU is the number itself, which moves on
        return names | {str(device): self._next[device].cpu().clone() for device in self._begun}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on where :meth:`state` was asked; the generator must have its state of then, too."""
        with self._lock:
            mark, rank, start = (word & _WORD for word in state["follows"].tolist())
            self._follows, self._start = (mark, rank), start
            self._begun.clear()
            self._left.clear()
            for name in state.keys() - {"follows"}:
                device = torch.device(name.removeprefix("left."))
                if name.startswith("left."):
                    self._left[device] = list(state[name].to(device).unbind())
                else:
                    self._following(device).copy_(state[name])


def mark_seeded(generator: torch.Generator) -> tuple[int, int]:
    """Return a seed from the state of a generator, and the mark that is left there; its numbers do not change."""
    state = generator.get_state()
    words = _words_of(state)
    seed = _hashed(words)
    _move_on(words)
    words[_SEED] = mark = mixed(seed ^ _MARK)
    generator.set_state(state)
    return seed, mark


def captures() -> bool:
    """Return whether a CUDA graph is captured from the current stream."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


_HAS_GROUPS = distributed.is_available()
# by two operators, which take the host longer than a kernel takes to make them (docs/decisions/0046)
_AT_ONCE = 64
_MARK = mixed(1)  # what makes a mark another word than the seed
_seeds = _Seeds()
_of_pass: ContextVar[dict[torch.device, Iterator[Tensor]] | None] = ContextVar("_of_pass", default=None)


@contextmanager
def drawn_once() -> Iterator[None]:
    """Draw once for all seeds that are asked for inside the with-block, by this thread: in a pass through a model.

    Inside of another such block it goes on with the seeds of that one. On fake tensors nothing is drawn.
    """
    if _of_pass.get() is not None or faked():
        yield
        return
    _seeds.begin()
    token = _of_pass.set({})
    try:
        yield
    finally:
        _of_pass.reset(token)


def begin() -> None:
    """Let the seeds of a step begin that has none in its forward pass: in its backward pass they only go on."""
    _seeds.begin()


def draw_as(rank: int) -> None:
    """Let this process draw the seeds of a process of that rank, in the process group of now.

    Processes that compute the same, as those that share layers do around these, must draw the same numbers. This holds
    for all that the process draws, until the process group ends.
    """
    _seeds.rank = rank


def saved_seeds() -> dict[str, Tensor]:
    """Return where the fresh seeds of this process are, for a run that is to go on later."""
    return _seeds.state()


def restore_seeds(state: dict[str, Tensor]) -> None:
    """Go on with the seeds of a run; torch's generator must have its state of then."""
    _seeds.restore(state)


@contextmanager
def seeds_apart() -> Iterator[None]:
    """Inside the block, draw seeds that begin anew; after it go on with those of before, as if none had been drawn."""
    global _seeds
    own, _seeds = _seeds, _Seeds()
    _seeds.rank = own.rank
    try:
        yield
    finally:
        _seeds = own


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
    plain, marked = torch.Generator("cpu").manual_seed(1), torch.Generator("cpu").manual_seed(1)
    (first, mark), (second, other) = mark_seeded(marked), mark_seeded(marked)
    different = len({first, mark, second, other}) == 4 and marked.initial_seed() == other
    # more numbers than two blocks of the generator's 624 words
    drawn, again = (torch.rand(1300, generator=each, device="cpu") for each in (plain, marked))
    same = torch.equal(drawn, again)
    if not (different and same):
        raise KernelError(
            f"seeds cannot be drawn: the state of torch {torch.__version__}'s CPU generator is not laid out as in the "
            "versions actbench knows; use a version it was tested with (see 'actbench doctor')"
        )


def _one_seed(like: Tensor) -> Tensor:
    _seeds.begin()
    return _seeds.take(like.device, 1).view(())


@define("fresh_seed(Tensor like) -> Tensor", {EVERYWHERE: _one_seed}, tags=RANDOM)
def _seed_in_a_graph(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.int64)


def fresh_seed(like: Tensor) -> Tensor:
    """Return a fresh seed on the device of a tensor: a 0-d int64 tensor, any of its 2**64 values.

    Compilers and simulations see an operator that makes it. A compiler may draw again in the backward pass, so all that
    the backward pass needs of a draw must be results of one operator.

    Raises:
        KernelError: The state of torch's generator has an unknown layout, or the first seed of all is drawn while a
            CUDA graph is captured.
    """
    if type(like) is FakeTensor or faked() or traced():
        return _seed_in_a_graph(like)
    return seed_on(like.device)


def seed_on(device: torch.device) -> Tensor:
    """Do as :func:`fresh_seed` on a device, where nothing sees operators (:func:`actbench.ops.library.is_watched`)."""
    of_pass = _of_pass.get()
    if of_pass is None:
        return _seeds.seed(device)
    left = of_pass.get(device)
    if left is None:
        left = of_pass[device] = _seeds.several(device)
    return next(left)
