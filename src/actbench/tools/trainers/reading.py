"""The bytes that the model of a training run saves for backward, with and without the scheme."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from actbench.errors import ActbenchError, UntraceableError
from actbench.measuring.inspection.itemized import tensors_in
from actbench.measuring.inspection.recorder import StorageRecorder, traced
from actbench.scheme.conditions import Precision
from actbench.scheme.setup import TrainingSetup
from actbench.simulator import profiles
from actbench.simulator.card import operators_of
from actbench.tools.convert.model import shaped_like
from actbench.tools.trainers.probe import Probe

_PROBED = 2
"""The number of the pass whose gradient is compared."""


@dataclass(frozen=True)
class Reading:
    """Bytes that one forward pass saves for its backward pass; of its results, only a loss counts.

    ``exact_bytes`` are the bytes without the scheme; None if unknown.
    """

    activation_bytes: int
    exact_bytes: int | None

    def logged(self) -> dict[str, int]:
        """Return the numbers by their logged names."""
        found = {"actbench/activation_bytes": self.activation_bytes}
        if self.exact_bytes is not None:
            found["actbench/exact_bytes"] = self.exact_bytes
            found["actbench/saved_bytes"] = self.exact_bytes - self.activation_bytes
        return found


class Watch:
    """Reads the saved bytes of the first of every ``interval`` forward passes of a model in training.

    This pass runs under a dispatch mode that notes its storages. Those still alive when the backward pass reaches the
    first of the model's results were saved. The exact model never runs on real tensors: in the context of ``undone``
    the unconverted model runs forward on fake tensors, once for each shape of the batch.

    Args:
        undone: A context in which the model is unconverted.
        interval: Forward passes per reading.
        autocast_dtype: Dtype for ``torch.autocast`` if it is not active around the model's forward, or None.
        probe: Measures the gradient's error in the second pass, by which most schemes have allocated their bits.

    Attributes:
        passes: Forward passes in training so far.
        last: The last reading; None before the first backward pass.
    """

    def __init__(
        self,
        undone: Callable[[], AbstractContextManager[None]],
        interval: int,
        autocast_dtype: torch.dtype | None,
        probe: Probe | None = None,
    ) -> None:
        self.probe = probe
        self._undone, self._interval, self._autocast_dtype = undone, interval, autocast_dtype
        self.passes = 0
        self._known: dict[Any, int | None] = {}
        self.last: Reading | None = None

    def run(self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward pass in training, and read every ``interval``-th."""
        self.passes += 1
        if self.probe is not None and self.passes == _PROBED:
            self.probe.run(module, inner, args, kwargs)
        if (self.passes - 1) % self._interval:
            return inner(module, *args, **kwargs)
        exact_bytes = self._exact_bytes(module, args, kwargs)
        known = {"parameter": list(module.parameters()), "buffer": list(module.buffers()), "batch": (args, kwargs)}
        with StorageRecorder(module, known) as recorder:
            output = inner(module, *args, **kwargs)
        nodes, scalars = _graph_of(output)
        device_type = _device_of(module).type
        pending = [(recorder, scalars)]

        def read(_: Any) -> None:
            if pending:
                if self.last is None:  # compiling kernels leaves frames in cycles, which hold tensors
                    gc.collect()
                self.last = Reading(_bytes_of(pending[0][0], device_type), exact_bytes)
                pending.clear()

        for node in nodes:
            node.register_prehook(read)
        return output

    def _exact_bytes(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        trained = sum(parameter.requires_grad for parameter in module.parameters())
        dtype = self._autocast_dtype or _autocast_dtype(_device_of(module).type)
        key = (trained, dtype, tuple(_shape_of(leaf) for leaf in tree_leaves((args, kwargs))))
        if key not in self._known:
            with self._undone():
                self._known[key] = _exact_bytes_on_fakes(module, dtype, args, kwargs)
        return self._known[key]


def _exact_bytes_on_fakes(module: nn.Module, dtype: torch.dtype | None, args: Any, kwargs: Any) -> int | None:
    """Return the bytes that a forward pass of an exact model saves; None, with a warning, if fake tensors fail."""
    setup = TrainingSetup(module, loss=_forward_only, precision=Precision(autocast=dtype))
    device_type = _device_of(module).type
    operators = operators_of(profiles.get(profiles.DEFAULT)) if device_type == "cuda" else nullcontext()
    try:
        if device_type != "cuda" and any(isinstance(part, nn.RNNBase) for part in module.modules()):
            raise UntraceableError("fake tensors do not show what a CPU saves for recurrent layers")
        with (
            operators,
            traced(setup, lambda: {"args": shaped_like(args), "kwargs": shaped_like(kwargs)}) as (recorder, _),
        ):
            return _bytes_of(recorder)
    except (ActbenchError, RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        warnings.warn(
            "actbench/exact_bytes and actbench/saved_bytes are not logged: the model without its scheme does not run "
            f"on fake tensors ({error})",
            stacklevel=2,
        )
        return None


def _forward_only(module: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Run the forward without hooks on the model itself, and keep only its graph and loss."""
    forward: Any = module.forward
    return _graph_of(forward(*batch["args"], **batch["kwargs"]))


def _graph_of(output: Any) -> tuple[list[Node], list[UntypedStorage]]:
    """Return the graph nodes of a model's results, and the storages of its scalar results."""
    results = list(tensors_in(dict(output) if isinstance(output, Mapping) else output))
    nodes = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    return nodes, [tensor.untyped_storage() for tensor in results if tensor.dim() == 0 and tensor.requires_grad]


def _bytes_of(recorder: StorageRecorder, device_type: str | None = None) -> int:
    """Return the bytes of the noted storages that are alive, on one type of device if given."""
    alive = [storage for storage, _ in recorder.made() if not recorder.is_on_host(storage)]
    return sum(storage.nbytes() for storage in alive if device_type in (None, storage.device.type))


def _device_of(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _shape_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
