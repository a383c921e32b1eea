"""Collectives over gloo, made to leave nothing to free to gloo's own threads.

Such a thread holds the tensors of a collective, and the copies that gloo makes of them, a moment longer than whoever
called it. Then they are freed in a thread that no profiler watches, and would count as alive for ever.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, distributed

_COLLECTIVES: Final = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_THREAD: Final = "pt_gloo_runloop"
_TASKS: Final = Path("/proc/self/task")
_MOST_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 1e-4


@contextmanager
def released_at_once() -> Iterator[None]:
    """Let torch's collectives inside the block be the last to hold what gloo's threads worked on.

    Of one that is asynchronous nothing is known.
    """
    with ExitStack() as patched:
        for name in _COLLECTIVES:
            if hasattr(distributed, name):
                waiting = _waiting(getattr(distributed, name))
                patched.enter_context(mock.patch.object(distributed, name, waiting))
        functional = torch.ops._c10d_functional
        waited = _waited(functional.wait_tensor)
        patched.enter_context(mock.patch.object(functional, "wait_tensor", waited))
        yield


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = collective(*args, async_op=True, **kwargs)
        if async_op or work is None:
            return work
        work.wait()
        _wait_for_threads()
        return None  # and here the work is given up, when only this thread has it

    return call


def _waited(wait: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what waits for the result of a functional collective, which it returns."""

    def call(result: Tensor) -> Tensor:
        result = wait(result)
        _wait_for_threads()
        return result

    return call


def _wait_for_threads() -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    while _any_works() and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def _any_works() -> bool:
    """Return whether a thread of gloo's has not gone back to waiting for work; Linux says it of each thread."""
    return any(_state(task) == "R" for task in _TASKS.glob("*"))


def _state(task: Path) -> str:
    """Return the letter of what a thread of gloo's does; nothing for other threads, and for one that has ended."""
    try:
        _, _, rest = (task / "stat").read_text().partition(f"({_THREAD}")
    except OSError:
        return ""
    return rest.partition(")")[2].strip()[:1]
