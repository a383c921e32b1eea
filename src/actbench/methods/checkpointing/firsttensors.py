"""The parameters and buffers of a block as its first run found them, for the runs that must repeat it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from actbench.errors import ConversionError


class _Found(NamedTuple):
    """A tensor at its place; version and memory are None for what may change."""

    path: str
    table: dict[str, Any]
    name: str
    value: Tensor
    version: int | None
    memory: Any  # a weak reference: who replaces .data wants the old memory back

    @classmethod
    def parameter(cls, path: str, part: nn.Module, name: str, value: Tensor) -> _Found:
        """Return a parameter; DeepSpeed's ZeRO gives its parameters other memory in each pass."""
        seen = value.layout == torch.strided and not hasattr(value, "ds_id")
        memory = weakref.ref(value.untyped_storage()) if seen else None
        version = None if value.is_inference() else value._version
        return cls(path, part._parameters, name, value, version, memory)

    def check(self, block: str) -> None:
        """Raise a ConversionError if the values visibly differ from those of the first run."""
        if self.memory is not None and self.memory() is not self.value.untyped_storage():
            how = "got other memory through .data"
        elif self.version is not None and self.value._version != self.version:
            how = "was changed in place"
        else:
            return
        raise ConversionError(
            f"{f'{self.path}.{self.name}'.lstrip('.')} of a recomputed {block} {how} between the forward "
            "and the backward pass, so that the block would compute something else when it runs again; change "
            "parameters after the backward pass, or leave out the scheme that recomputes the block"
        )

    def is_displaced(self) -> bool:
        """Return whether another tensor is there now, and this one is still in memory: FSDP frees its own."""
        has_memory = self.value.layout != torch.strided or self.value.untyped_storage().nbytes() > 0
        return self.table.get(self.name) is not self.value and has_memory


class FirstTensors:
    """The parameters and buffers that a block has now."""

    def __init__(self, module: nn.Module) -> None:
        self._block, self._found = type(module).__name__, list[_Found]()
        for path, part in module.named_modules():
            for name, value in part._parameters.items():
                if value is not None and not is_lazy(value):
                    self._found.append(_Found.parameter(path, part, name, value))
            for name, value in part._buffers.items():
                if value is not None and not is_lazy(value):
                    self._found.append(_Found(path, part._buffers, name, value, None, None))

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give the block its tensors of the first run inside the context, if others have replaced them.

        ``torch.func.functional_call`` takes its own away when the forward pass ends.

        Raises:
            ConversionError: A parameter has other values than in the first run.
        """
        for found in self._found:
            found.check(self._block)
        displaced = [(found, found.table.get(found.name)) for found in self._found if found.is_displaced()]
        try:
            for found, _ in displaced:
                found.table[found.name] = found.value
            yield
        finally:
            for found, now in displaced:
                found.table[found.name] = now
