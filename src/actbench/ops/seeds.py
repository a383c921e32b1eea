"""Fresh seeds that follow ``torch.manual_seed`` without taking a number from torch's generator.

Dropout on the CPU draws from the default generator, so a scheme that drew its seeds there would change the masks of the
model it is compared with. A generator of our own could not know that ``torch.manual_seed`` was called, nor be saved,
restored and forked with torch's. So a seed is a hash of the default generator's state, and what is moved on is a part
of the state that no number depends on: of 624 words of a Mersenne twister (Matsumoto, Nishimura 1998) the low 31 bits
of the first never enter the next 624, and the word itself is the first to be used up.

Checkpointing sets the generator back before it runs a block again, so that dropout draws the masks of the first run,
and sets it forth afterwards. Seeds must not come again: their errors would no longer be independent. So what is drawn
in a backward pass is told apart by a count as well, and the generator is moved on when the pass is over. One thing
repeats: a graph that is kept, and recomputed a second time by torch's own checkpointing, has the seeds of the first
time in the second; ``+checkpoint`` tells these apart too.
"""

from __future__ import annotations

import functools
import threading

import numpy as np
import torch
from torch import Tensor, distributed
from torch.autograd import Variable

from actbench.errors import KernelError
from actbench.ops import noise
from actbench.ops.library import EVERYWHERE, RANDOM, define

# The state as 64-bit words: initial seed, flags, position in the block, then the 624 words of the block.
_SEED, _POSITION, _BLOCK = 0, 2, 3
_UNUSED = (1 << 31) - 1


def draw(generator: torch.Generator) -> int:
    """Return a fresh 64-bit seed from the state of a CPU generator, whose numbers stay what they would have been."""
    seed = _seed_of(generator)
    _move_on(generator)
    return seed


def _seed_of(generator: torch.Generator) -> int:
    words = generator.get_state().numpy()[: (_BLOCK + 624) * 8].view(np.uint64)
    seed = 0
    for index in (_SEED, _POSITION, _BLOCK, _BLOCK + 1, _BLOCK + 2):
        seed = noise.mixed(seed ^ int(words[index]))
    return seed


def _move_on(generator: torch.Generator) -> None:
    state = generator.get_state()
    words = state.numpy()[: (_BLOCK + 624) * 8].view(np.uint64)
    first = int(words[_BLOCK])
    words[_BLOCK] = (first & ~_UNUSED) | ((first + 1) & _UNUSED)
    generator.set_state(state)


class _Draws:
    """Draws from torch's generator that never repeat, in forward passes and in backward passes.

    A re-entrant backward pass is a pass inside of another; the count goes on until all that drew are over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: dict[int, int] = {}  # each with the thread that drew first in it
        self._count = 0

    def seed(self) -> int:
        """Return a seed; in a backward pass, where the generator may have been set back, leave the generator alone."""
        running: int = torch._C._current_graph_task_id()
        with self._lock:
            if running < 0:
                self._forget_failed()
                return draw(torch.default_generator)
            if running not in self._passes:
                self._passes[running] = threading.get_ident()
                Variable._execution_engine.queue_callback(functools.partial(self._end, running))
            self._count += 1
            return noise.mixed(_seed_of(torch.default_generator) ^ noise.mixed(self._count))

    def _forget_failed(self) -> None:
        """Forget passes of this thread, which runs none now: one that failed does not say that it is over."""
        own = threading.get_ident()
        self._passes = {running: thread for running, thread in self._passes.items() if thread != own}
        if not self._passes:
            self._count = 0

    def _end(self, over: int) -> None:
        """Move the generator on past what a pass drew: the next step may begin where it stands."""
        with self._lock:
            self._passes.pop(over, None)
            if not self._passes:
                self._count = 0
            _move_on(torch.default_generator)


_draws = _Draws()


def diverge(generator: torch.Generator, branch: int) -> None:
    """Let later draws give other seeds on each branch, while the generator's numbers stay what they would have been.

    Branch 0 is the one without this call. What is changed is the note of the seed that the generator was given, on
    which no number depends; ``torch.manual_seed`` undoes it.
    """
    if branch:
        state = generator.get_state()
        words = state.numpy()[: _BLOCK * 8].view(np.uint64)
        words[_SEED] = noise.mixed(int(words[_SEED]) ^ noise.mixed(branch))
        generator.set_state(state)


@functools.cache
def _check_layout() -> None:
    """Try on a generator of our own that the state lies as this file says.

    Raises:
        KernelError: It does not, in this version of torch.
    """
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
            "a seed was asked for while a CUDA graph is captured, whose replays would all use that one; "
            "leave what draws seeds out of the graph"
        )


def _fresh_seed() -> Tensor:
    _check_layout()
    _refuse_capture()
    seed = _draws.seed()
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    if rank:  # ranks are often seeded alike; their errors must not be. Rank 0 draws what a single process draws
        seed = noise.mixed(seed ^ rank)
    return torch.tensor(noise.signed(seed), dtype=torch.int64, device="cpu")


@define("fresh_seed() -> Tensor", {EVERYWHERE: _fresh_seed}, tags=RANDOM)
def fresh_seed() -> Tensor:
    """Return a fresh seed: a 0-d int64 CPU tensor, any of its 2**64 values.

    A compiler may draw again in the backward pass: there, seed and what is made by it must come of one operator.

    Raises:
        KernelError: The state of torch's generator is laid out in another way than known, or a CUDA graph is captured.
    """
    return torch.empty((), dtype=torch.int64, device="cpu")
