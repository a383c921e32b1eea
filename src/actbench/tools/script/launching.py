"""Runs a user's script as Python does, and says in one message why it came to no step."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

from actbench.device.patches import replaced
from actbench.errors import (
    ActbenchError,
    CodeError,
    MeasurementError,
    OutOfMemoryError,
    UntraceableError,
    is_out_of_memory,
    is_users,
)
from actbench.model.scripts import Script
from actbench.simulator.fake import shapes_only
from actbench.tools.script.processes import children
from actbench.tools.script.processes.children import GivenUp, users_line
from actbench.tools.script.processes.groups import environment, refused_package

_LAUNCHED = "{} reads the environment variable {}{}: it is launched by torchrun; give --gpus N, the number of processes"
_NO_LINE = ("EOF when reading a line",)
"""What ``input`` says at the end of standard input."""

_REMEDY = "run it on a GPU with --meter cuda, or small on this machine with --meter cpu"


def run(script: Script, given_up: GivenUp) -> None:
    """Run a script as ``python`` does: as ``__main__``, with its arguments, its folder first on the path.

    Args:
        script: The script.
        given_up: Told, in another thread, why a script is ended that waits for processes which cannot begin.

    Raises:
        CodeError: The script failed; the message names the error and the line.
        OutOfMemoryError: Memory ran out and the script did not catch it.
        MeasurementError: It ended by ``sys.exit``, starts other processes, or reads standard input.
        UntraceableError: It needs values that only a real run knows.
    """
    with ExitStack() as stack:
        stack.enter_context(children.watched(given_up))
        stack.enter_context(replaced(sys, "argv", lambda own: [script.target, *script.arguments]))
        folder = os.getcwd() if script.is_module else str(Path(script.target).resolve().parent)
        stack.enter_context(replaced(sys, "path", lambda own: [folder, *own]))
        try:
            with shapes_only(script.shown, _REMEDY):
                if script.is_module:
                    runpy.run_module(script.target, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(script.target, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise MeasurementError(f"{script.shown} ended by sys.exit({error.code!r}){line_of(error)}") from error
        except (ActbenchError, KeyboardInterrupt) as error:
            if type(error) in (MeasurementError, UntraceableError):
                raise type(error)(f"{error}{line_of(error)}") from error
            raise
        except Exception as error:
            raise _error_of(script, error) from error


def _error_of(script: Script, error: Exception) -> ActbenchError:
    """Return what to say of an error that the script did not catch."""
    where = line_of(error)
    if isinstance(error, EOFError) and error.args == _NO_LINE:  # and not of a file that ends too early
        return MeasurementError(f"{script.shown} reads standard input, which is empty here{where}: give it arguments")
    refusal = refused_package(error.name) if isinstance(error, ModuleNotFoundError) else None
    if refusal is not None:
        return MeasurementError(f"{refusal}{where}")
    if isinstance(error, KeyError) and {*error.args} & environment(2, 2).keys():
        return MeasurementError(_LAUNCHED.format(script.shown, error.args[0], where))
    if is_out_of_memory(error):
        return OutOfMemoryError(f"{message_of(error)}{where}")
    return CodeError(f"{script.shown} failed: {message_of(error)}{_unsaid(error)}{where}")


def _unsaid(error: Exception) -> str:
    """Return the line of a library that raised an error without a message, such as one of ``assert``."""
    frames = traceback.extract_tb(error.__traceback__)
    if str(error) or not frames or is_users(frames[-1].filename):
        return ""
    last = frames[-1]
    return f" at {'/'.join(Path(last.filename).parts[-2:])}:{last.lineno} {last.line}"


def line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error, or what caused it, came from, in parentheses."""
    cause: BaseException | None = error
    while cause is not None:
        if line := users_line(traceback.extract_tb(cause.__traceback__)):
            return f" ({line})"
        cause = cause.__cause__
    return ""
