from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from actbench.errors import ActbenchError, ModelError, OutOfMemoryError, UntraceableError, is_out_of_memory, told

T = TypeVar("T")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class UserFile:
    """A Python file of the user's own, run as ``python file.py`` would run it.

    Args:
        path: The file.
        spec: The model specification, for messages.

    Raises:
        ModelError: It does not exist or does not run.
    """

    def __init__(self, path: Path, spec: str) -> None:
        self.path, self.spec = path, spec
        if not os.path.isfile(path):
            raise ModelError(f"model {spec!r}: there is no file {path}")
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        self._module = importlib.util.module_from_spec(module_spec)
        beside = str(path.resolve().parent)
        if beside not in sys.path:  # as for a script, so that the file can import its neighbours
            sys.path.insert(0, beside)
        loader = module_spec.loader
        self.run(lambda: loader.exec_module(self._module))

    def function(self, name: str) -> Callable[[], Any]:
        """Return a function of the file.

        Raises:
            ModelError: It has none of this name.
        """
        found = getattr(self._module, name, None)
        if not callable(found):
            raise ModelError(f"model {self.spec!r}: {self.path} has no function {name!r}")
        return found  # type: ignore[no-any-return]

    def run(self, call: Callable[[], T]) -> T:
        """Run the user's code; what it raises becomes an error with the file and line.

        Raises:
            ModelError: It failed.
            OutOfMemoryError: It failed for want of memory.
        """
        try:
            return call()
        except (ActbenchError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too
            raise self._failed(error) from error

    def run_without_memory(self, call: Callable[[], T]) -> T:
        """Run the user's code where large tensors are fake; see :meth:`run`.

        Raises:
            ModelError: It failed.
            UntraceableError: It failed because it needs what fake tensors do not have.
        """
        try:
            return call()
        except (ActbenchError, KeyboardInterrupt):
            raise
        except BaseException as error:
            if not _is_of_fakes(error):
                raise self._failed(error) from error
            raise UntraceableError(
                f"{self.line(error)}: this runs without memory here, so large tensors have no values to look at, to "
                f"save or to hand to numpy ({_first_line(error)}); no simulated byte depends on values: leave that "
                "step out, or measure with --meter cpu or --meter cuda, which run it in full"
            ) from error

    def _failed(self, error: BaseException) -> ActbenchError:
        if is_out_of_memory(error):
            return OutOfMemoryError(
                f"{self.line(error)}: the model does not fit in memory while it is built ({_first_line(error)}); "
                "--meter simulated builds it without any"
            )
        return ModelError(f"{self.line(error)}: {_first_line(error)}")

    def line(self, error: BaseException) -> str:
        """Return the last place in the file that an error came through, or the file."""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}"
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if self._is_here(frame.filename)]
        return f"{self.path}:{own[-1].lineno}" if own else str(self.path)

    def raised(self, error: BaseException) -> bool:
        """Return whether a line of the file itself raised an error, and none of what it calls."""
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and self._is_here(frames[-1].filename)

    def _is_here(self, file: str) -> bool:
        return Path(file).resolve() == self.path.resolve()


def _first_line(error: BaseException) -> str:
    return told(error).splitlines()[0]


def _is_of_fakes(error: BaseException) -> bool:
    """Whether an error is torch's about fake tensors: of its type, in its words, or raised by their code."""
    words = ("tensor subclass", "FakeTensor", "meta")
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, _NEEDS_VALUES)
        or any(word in told(error) for word in words)
        or any("_subclasses" in Path(frame.filename).parts for frame in frames[-3:])
    )
