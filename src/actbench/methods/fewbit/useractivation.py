"""A user's own activation, named ``file.py:name``: the layers that compute it, and its derivative.

A class derived from ``nn.Module`` matches the layers of exactly this class, each with its own attributes. A function
from a tensor to a tensor matches every layer without weights that computes the same, to 1e-9.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actbench.errors import ConversionError, UsageError, boundary
from actbench.methods.fewbit import computed
from actbench.methods.fewbit.activation import Activation, own_activation
from actbench.model.neighbours import find_neighbours_of
from actbench.paths import MOST_BYTES, from_home, read_bytes


def check(spec: str) -> None:
    """Check that ``file.py:name`` names something, without running the file.

    Raises:
        ValueError: There is no such file, it is not Python, or it does not define the name.
    """
    file, _, name = spec.rpartition(":")
    try:
        body = ast.parse(read_bytes(from_home(file), MOST_BYTES), file).body
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UsageError as error:
        raise ValueError(str(error)) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the parser's stack is a few thousand deep
        raise ValueError(f"{file} is not Python: {error}") from None
    found = {name for statement in body for name in _given(statement)}
    if name not in found and "*" not in found:
        close = difflib.get_close_matches(name, found, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it defines {', '.join(sorted(found)) or 'nothing'}"
        raise ValueError(f"{file} defines no {name!r}{hint}")


def _given(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [(alias.asname or alias.name).partition(".")[0] for alias in names]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


@dataclass(frozen=True)
class OwnFunction:
    """The object named by ``file.py:name``, after the file was run: a subclass of ``nn.Module``, or a function."""

    spec: str
    found: Any
    _known: list[Activation] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def load(cls, spec: str) -> OwnFunction:
        """Run the file, and return what it names.

        Raises:
            UsageError: The file fails, or the named object is neither a class of layers nor a function.
        """
        file, _, name = spec.rpartition(":")
        path = from_home(file).resolve()
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        if module_spec is None or module_spec.loader is None:
            raise UsageError(f"functions={spec}: {file} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        find_neighbours_of(path)
        with boundary(f"functions={spec}", UsageError):
            module_spec.loader.exec_module(module)
            found = getattr(module, name)
        if not callable(found) or (isinstance(found, type) and not issubclass(found, nn.Module)):
            raise UsageError(f"functions={spec}: {name} is neither a function of a tensor nor a class of nn.Module")
        return cls(spec, found)

    def activation(self) -> Activation:
        """Return the function; a class is made without arguments.

        Raises:
            UsageError: Its derivative cannot be tabulated, or its class needs arguments.
        """
        if not isinstance(self.found, type):
            return self._activation(self.found)
        with boundary(f"{self.spec}() fails", UsageError):
            layer = self.found()
        return self._activation(layer.double().forward)

    def of(self, layer: nn.Module) -> Activation | None:
        """Return the function of a layer if it is this one, else None.

        Raises:
            UsageError: It is this one, but its derivative cannot be tabulated.
            ConversionError: It is this one, but has weights to train, whose gradient needs the input.
        """
        if not isinstance(self.found, type):
            return self._activation(self.found) if self._computed_by(layer) else None
        if not _same_class(type(layer), self.found):
            return None
        if any(parameter.requires_grad for parameter in layer.parameters()):
            raise ConversionError(
                f"functions={self.spec}: its layers have weights to train, whose gradient needs the whole input"
            )
        # a copy, since double() casts in place
        return self._activation(copy.deepcopy(layer).double().forward)

    def _activation(self, function: Callable[[Tensor], Tensor]) -> Activation:
        """Return the function for tables: one object for layers that compute the same, so that it is solved once."""
        new = own_activation(self.spec, function)
        x = np.linspace(-50, 50, 4097)
        for known in self._known:
            if np.allclose(known.derivative(x), new.derivative(x), rtol=1e-12, atol=1e-14):
                return known
        self._known.append(new)
        return new

    def _computed_by(self, layer: nn.Module) -> bool:
        is_finite = np.isfinite(computed.points())
        points = torch.from_numpy(computed.points()[is_finite])
        # the user's function may draw numbers, which the model's run must not miss
        with computed.alone(), torch.random.fork_rng(devices=[]), torch.no_grad():
            expected = self.found(points.clone())
        if not isinstance(expected, Tensor) or expected.shape != points.shape:
            raise UsageError(f"functions={self.spec} must return one value for each element of a vector")
        found = computed.numbers_of(layer)
        return (
            found is not None
            and found.inplace is bool(getattr(layer, "inplace", False))
            and np.allclose(found.values[is_finite], expected.numpy(), rtol=1e-9, atol=1e-12, equal_nan=True)
        )


def _same_class(one: type[Any], other: type[Any]) -> bool:
    """Return whether two classes are one class, or come from the same lines of a file that was run twice."""
    return one is other or (_place(one) is not None and _place(one) == _place(other))


def _place(kind: type[Any]) -> tuple[Path, int, str] | None:
    forward = vars(kind).get("forward")
    code = getattr(forward, "__code__", None)
    return None if code is None else (Path(code.co_filename).resolve(), code.co_firstlineno, forward.__qualname__)
