"""Runs a user's script as Python does, and says in one message why it came to no step."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from actbench.errors import (
    ActbenchError,
    CodeError,
    MeasurementError,
    OutOfMemoryError,
    UntraceableError,
    is_out_of_memory,
    is_users,
    told,
)
from actbench.model.scripts import Script
from actbench.simulator.fake import shapes_only
from actbench.simulator.overrides import replaced
from actbench.tools.script.groups import environment, refused_package

_CHILDREN = (
    "the script starts other processes ({}), which would not see the simulated card: actbench run --gpus N gives it "
    "the place of the first of N processes, as torchrun does; run the script of one process"
)

_LAUNCHED = "{} reads the environment variable {}{}: it is launched by torchrun; give --gpus N, the number of processes"
_REMEDY = "run it on a GPU with --meter cuda, or small on this machine with --meter cpu"


def run(script: Script) -> None:
    """Run a script as ``python`` does: as ``__main__``, with its arguments, its folder first on the path.

    Raises:
        CodeError: The script failed; the message names the error and the line.
        OutOfMemoryError: Memory ran out and the script did not catch it.
        MeasurementError: It ended by ``sys.exit``, starts other processes, or reads standard input.
        UntraceableError: It needs values that only a real run knows.
    """
    with ExitStack() as stack:
        stack.enter_context(_alone())
        stack.enter_context(replaced(sys, "argv", lambda own: [script.target, *script.arguments]))
        folder = os.getcwd() if script.is_module else str(Path(script.target).resolve().parent)
        stack.enter_context(replaced(sys, "path", lambda own: [folder, *own]))
        try:
            with shapes_only(script.text, _REMEDY):
                if script.is_module:
                    runpy.run_module(script.target, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(script.target, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise MeasurementError(f"{script.text} ended by sys.exit({error.code!r}){line_of(error)}") from error
        except UntraceableError as error:
            raise UntraceableError(f"{error}{line_of(error)}") from error
        except (ActbenchError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise _told(script, error) from error


def _told(script: Script, error: Exception) -> ActbenchError:
    """Return what to say of an error that the script did not catch."""
    where = line_of(error)
    if isinstance(error, EOFError):
        return MeasurementError(f"{script.text} reads standard input, which is empty here{where}: give it arguments")
    refusal = refused_package(error.name) if isinstance(error, ModuleNotFoundError) else None
    if refusal is not None:
        return MeasurementError(f"{refusal}{where}")
    if isinstance(error, KeyError) and {*error.args} & environment(2, 2).keys():
        return MeasurementError(_LAUNCHED.format(script.text, error.args[0], where))
    if is_out_of_memory(error):
        return OutOfMemoryError(f"{told(error)}{where}")
    return CodeError(f"{script.text} failed: {told(error)}{where}")


def line_of(error: BaseException) -> str:
    """Return the innermost line of code that is neither Python's, nor installed, nor ours, in parentheses."""
    cause: BaseException | None = error
    while cause is not None:
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if is_users(frame.filename):
                return f" ({Path(frame.filename).name}:{frame.lineno} {frame.line})"
        cause = cause.__cause__
    return ""


@contextmanager
def _alone() -> Iterator[None]:
    """Inside the block, refuse to start processes that train."""

    def refused(name: str) -> Callable[[Any], Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise MeasurementError(_CHILDREN.format(name))

        return lambda own: refuse

    with (
        replaced(torch.multiprocessing, "spawn", refused("torch.multiprocessing.spawn")),
        replaced(torch.multiprocessing, "start_processes", refused("torch.multiprocessing.start_processes")),
    ):
        yield
