from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from actbench.errors import ModelError
from actbench.records import Case
from actbench.training import Batch, Loss, TrainingSetup
from actbench.workloads.construct import seeded
from actbench.workloads.optimizers import make_optimizer

T = TypeVar("T")
CONTRACT = "(module, make_batch, loss): an nn.Module, a function from n to a batch, a function from both to a scalar"


class FunctionWorkload:
    """What a function in a Python file of the user's own builds: ``file.py:function``.

    The function takes no argument and returns ``(module, make_batch, loss)``: an ``nn.Module``,
    ``make_batch(n) -> dict`` with n samples, and ``loss(module, batch) -> scalar tensor``. The file is run, as
    ``python file.py`` would run it. Both functions are called under torch seeds, and ``make_batch`` under fake tensors
    too, where it must not read values::

        def build():
            model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
            def make_batch(n):
                return {"x": torch.randn(n, 64), "y": torch.randint(10, (n,))}
            def loss(module, batch):
                return nn.functional.cross_entropy(module(batch["x"]), batch["y"])
            return model, make_batch, loss

    Args:
        name: ``file.py:function``.
        case: Gives the types and the optimizer.

    Raises:
        ModelError: The file does not exist or does not run, or has no such function.
    """

    weights_origin = "function"

    def __init__(self, name: str, case: Case) -> None:
        path, _, function = name.rpartition(":")
        self.case = case
        self.spec = case.model
        self.warnings: tuple[str, ...] = ()
        self.path = Path(path).expanduser()
        self._build = self._find(function)
        self._make_batch: Callable[[int], Batch] | None = None

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Call the function. The model is always built in full, since only its author knows how else to.

        Raises:
            ModelError: The function fails, or does not return what it should.
        """
        module, self._make_batch, loss = self._parts(seed)
        return TrainingSetup(
            module=module.train().to(getattr(torch, self.case.dtype)),
            loss=loss,
            make_optimizer=make_optimizer(self.case.optimizer),
            autocast_dtype=getattr(torch, self.case.autocast) if self.case.autocast else None,
        )

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Call ``make_batch``; floating tensors are brought to the case's type.

        Raises:
            ModelError: ``make_batch`` fails or returns no mapping.
        """
        if self._make_batch is None:
            _, self._make_batch, _ = self._parts(seed)
        make_batch = self._make_batch
        with seeded(seed):
            batch = self._run(lambda: make_batch(batch_size))
        if not hasattr(batch, "items"):
            found = type(batch).__name__.removeprefix("Fake")
            raise ModelError(f"{self.spec}: make_batch returned {found}, not a dict of tensors")
        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
        if tensors and all(value.shape[0] != batch_size for value in tensors.values()):
            shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in tensors.items())
            raise ModelError(
                f"{self.spec}: make_batch({batch_size}) returned {shapes}; at least one tensor must hold {batch_size} "
                "samples along its first dimension"
            )
        dtype = getattr(torch, self.case.dtype)
        return {key: value.to(dtype) if _is_floating(value) else value for key, value in batch.items()}

    def _find(self, function: str) -> Callable[[], Any]:
        if not self.path.is_file():
            raise ModelError(f"model {self.spec!r}: there is no file {self.path}")
        module_spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        beside = str(self.path.resolve().parent)
        if beside not in sys.path:  # as for a script, so that the file can import its neighbours
            sys.path.insert(0, beside)
        loader = module_spec.loader
        self._run(lambda: loader.exec_module(module))
        found = getattr(module, function, None)
        if not callable(found):
            raise ModelError(f"model {self.spec!r}: {self.path} has no function {function!r}")
        return found  # type: ignore[no-any-return]

    def _parts(self, seed: int) -> tuple[nn.Module, Callable[[int], Batch], Loss]:
        with seeded(seed):
            parts = self._run(self._build)
        if not isinstance(parts, tuple) or len(parts) != 3:
            raise ModelError(f"{self.spec} returned {type(parts).__name__}; it must return {CONTRACT}")
        module, make_batch, loss = parts
        if not isinstance(module, nn.Module) or not callable(make_batch) or not callable(loss):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise ModelError(f"{self.spec} returned ({kinds}); it must return {CONTRACT}")
        return module, make_batch, loss

    def _run(self, call: Callable[[], T]) -> T:
        """Run the user's code; what it raises becomes an error with the file and line."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise ModelError(f"{self._line(error)}: {type(error).__name__}: {error}") from error

    def _line(self, error: BaseException) -> str:
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}"
        here = self.path.resolve()
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == here]
        return f"{self.path}:{own[-1].lineno}" if own else str(self.path)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
