"""Python files of the user, and errors in them with file and line."""

from __future__ import annotations

import importlib.util
import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from actbench.errors import ActbenchError, ModelError, OutOfMemoryError, UntraceableError, is_out_of_memory, message_of
from actbench.model.declared.functions import no_file, no_function
from actbench.model.neighbours import find_neighbours_of

T = TypeVar("T")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class UserFile:
    """The user's own Python file, run as by ``python file.py``; ``spec`` is for messages.

    Raises:
        ModelError: The file does not exist or does not run.
    """

    def __init__(self, path: Path, spec: str) -> None:
        self.path, self.spec = path, spec
        if not os.path.isfile(path):
            raise no_file(spec, path)
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        self._module = importlib.util.module_from_spec(module_spec)
        find_neighbours_of(path)
        loader = module_spec.loader
        self.run(lambda: loader.exec_module(self._module))

    def function(self, name: str) -> Callable[[], Any]:
        """Return the function of this name; a ModelError if the file has none, or if it must be given arguments."""
        found = getattr(self._module, name, None)
        if not callable(found):
            raise no_function(self.spec, self.path, name)
        needed = _needed(found)
        if needed:
            raise ModelError(
                f"model {self.spec!r}: {name!r} needs {needed}, and it is called without arguments: give each of its "
                "parameters a default"
            )
        return found  # type: ignore[no-any-return]

    def run(self, call: Callable[[], T], *, fakes: bool = False) -> T:
        """Run the user's code, where ``fakes`` says that large tensors are fake; its errors get file and line.

        Raises:
            ModelError: The code failed.
            OutOfMemoryError: The model does not fit in memory.
            UntraceableError: The code needs the values or the memory of fake tensors.
        """
        try:
            return call()
        except (ActbenchError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too
            raise self._failed(error, fakes) from error

    def _failed(self, error: BaseException, fakes: bool) -> ActbenchError:
        if fakes and _is_of_fakes(error):
            return UntraceableError(
                f"{self.line(error)}: this runs without memory here, so large tensors have no values to read, to save "
                f"or to hand to numpy ({_first_line(error)}); no simulated byte depends on values: leave this line "
                "out, or measure with --meter cpu or --meter cuda, which run it in full"
            )
        if is_out_of_memory(error):
            return OutOfMemoryError(
                f"{self.line(error)}: the model does not fit in memory while it is built ({_first_line(error)}); "
                "--meter simulated builds it without any"
            )
        return ModelError(f"{self.line(error)}: {_first_line(error)}")

    def line(self, error: BaseException) -> str:
        """Return file and line where an error left the user's file, or the file alone."""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}"
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if self._is_here(frame.filename)]
        return f"{self.path}:{own[-1].lineno}" if own else str(self.path)

    def raised(self, error: BaseException) -> bool:
        """Return whether the file itself raised an error, rather than code that it calls."""
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and self._is_here(frames[-1].filename)

    def _is_here(self, file: str) -> bool:
        return Path(file).resolve() == self.path.resolve()


def _needed(function: Callable[..., Any]) -> str:
    """Return the names of the parameters that a function has no default for."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C
        return ""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(each.name for each in parameters if each.default is each.empty and each.kind not in optional)


def _first_line(error: BaseException) -> str:
    return message_of(error).splitlines()[0]


def _is_of_fakes(error: BaseException) -> bool:
    """Whether an error is torch's about fake tensors: by its type, its words, or the code that raised it."""
    words = ("tensor subclass", "FakeTensor", "meta")
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, _NEEDS_VALUES)
        or any(word in message_of(error) for word in words)
        or any("_subclasses" in Path(frame.filename).parts for frame in frames[-3:])
    )
