"""Processes that a script starts: those that would train are refused, and a pool whose workers cannot begin."""

from __future__ import annotations

import multiprocessing.pool
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from actbench.device.patches import replaced
from actbench.errors import ActbenchError, MeasurementError, is_users

GivenUp = Callable[[ActbenchError], object]
"""Ends a script whose own thread waits; told why."""

_TRAINING = (
    "the script starts other processes ({}), which would not see the simulated card: actbench run --gpus N gives it "
    "the place of the first of N processes, as torchrun does; run the script of one process"
)
_WORKERS = (
    "the workers of a multiprocessing.Pool end before they have work (exit code {}), and it starts others for ever; "
    "those that are spawned import the script again, and see no simulated card: move what it does with the card behind "
    "if __name__ == '__main__', or take the start method fork ({})"
)


@contextmanager
def watched(given_up: GivenUp) -> Iterator[None]:
    """Inside the block, refuse to start processes that train, and give up a script whose pool starts them for ever."""
    made_at = ["by a library"]

    def making(own: Callable[..., None]) -> Callable[..., None]:
        def make(*args: Any, **kwargs: Any) -> None:
            made_at[0] = users_line(traceback.extract_stack()) or made_at[0]
            own(*args, **kwargs)

        return make

    def joining(own: Callable[[list[BaseProcess]], bool]) -> Any:
        def join(workers: list[BaseProcess]) -> bool:
            failed = [each.exitcode for each in workers if (each.exitcode or 0) > 0]
            if failed:
                given_up(MeasurementError(_WORKERS.format(failed[0], made_at[0])))
            return own(workers)

        return staticmethod(join)

    with (
        replaced(torch.multiprocessing, "spawn", _refused("torch.multiprocessing.spawn")),
        replaced(torch.multiprocessing, "start_processes", _refused("torch.multiprocessing.start_processes")),
        replaced(ForkingPickler, "_extra_reducers", _keeping_tensors),
        replaced(multiprocessing.pool.Pool, "__init__", making),
        replaced(multiprocessing.pool.Pool, "_join_exited_workers", joining),
    ):
        yield


def _refused(name: str) -> Callable[[Any], Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MeasurementError(_TRAINING.format(name))

    return lambda own: refuse


def _keeping_tensors(own: dict[type, Callable[..., Any]]) -> dict[type, Callable[..., Any]]:
    """Return how values are sent to other processes, where tensors of a simulation are sent to none."""

    def refuse(tensor: FakeTensor) -> Any:
        raise MeasurementError(_TRAINING.format("given its tensors"))

    return own | {FakeTensor: refuse}


def users_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of code that is neither Python's, nor installed, nor ours; empty if there is none."""
    lines = (
        f"{Path(each.filename).name}:{each.lineno} {each.line}" for each in reversed(frames) if is_users(each.filename)
    )
    return next(lines, "")
