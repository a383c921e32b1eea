"""The tensors that a training step holds between its operators, and their bytes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from actbench.ops.simulation import plain_tensors
from actbench.scheme.flat import flat_handles
from actbench.scheme.setup import TrainStep
from actbench.scheme.wrapped import HoldsGradients

_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))


def weights(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def made_tensors(module: nn.Module) -> list[Tensor]:
    """Return the fake tensors that modules hold as plain attributes after the pass.

    Examples are the weight that ``torch.nn.utils.spectral_norm`` and ``weight_norm`` compute, and a stored last output.
    """
    found: list[Tensor] = []
    for part in module.modules():
        own = [value for name, value in vars(part).items() if name not in _REGISTERED and _may_hold_tensors(value)]
        found += [tensor for tensor in tensors_in(own) if isinstance(tensor, FakeTensor)]
    return found


def _may_hold_tensors(value: Any) -> bool:
    is_empty = isinstance(value, dict | list | tuple) and not value
    return not (is_empty or isinstance(value, str | int | float | type | None))


def types(module: nn.Module) -> str | None:
    """Return the dtypes of a module's parameters, the one with the most bytes first: ``bfloat16+float32``."""
    held: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        held[parameter.dtype] += parameter.nbytes
    return "+".join(str(dtype).removeprefix("torch.") for dtype, _ in held.most_common()) or None


def gradients(step: TrainStep) -> list[Tensor]:
    """Return the gradients of parameters, and those that the optimizer stores in another form."""
    found = [parameter.grad for parameter in step.setup.module.parameters() if parameter.grad is not None]
    return [*found, *step.optimizer.gradient_parts()] if isinstance(step.optimizer, HoldsGradients) else found


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    return [*plain_tensors(*tensors_in(list(optimizer.state.values())))]


def model_bytes(step: TrainStep) -> int:
    """Return the bytes of weights, gradients and optimizer state, which no batch changes."""
    module = step.setup.module
    return stored_bytes([*weights(module), *gradients(step), *optimizer_state(step.optimizer)])


def gathered(module: nn.Module, before: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights of other processes that a sharded model holds right after its forward pass.

    ``before`` are its :func:`own_weights` from before the pass.
    """
    known = {id(storage) for storage in map(Tensor.untyped_storage, before)}
    held = own_weights(module)
    return [tensor for tensor in held if id(tensor.untyped_storage()) not in known] if before else []


def own_weights(module: nn.Module) -> list[Tensor]:
    """Return the plain tensors that hold the weights of a model shared out by FSDP; none of another model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, nothing is sharded
    if fsdp is None or not isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
        return []
    held = [*plain_tensors(*weights(module))]
    whole = [getattr(handle.flat_param, "_full_param_padded", None) for handle in flat_handles(module)]
    return held + [flat for flat in whole if flat is not None and flat.untyped_storage().nbytes()]


def everything(step: TrainStep) -> list[Tensor]:
    """Return the tensors alive before a step: weights, batch, optimizer state and gradient buffers."""
    held = [*weights(step.setup.module), *tensors_in(dict(step.batch)), *optimizer_state(step.optimizer)]
    return [*held, *lasting_gradients(step)]


def lasting_gradients(step: TrainStep) -> list[Tensor]:
    """Return the buffers that hold gradients from step to step: buckets, and an optimizer's accumulators."""
    own = step.optimizer.gradient_parts() if isinstance(step.optimizer, HoldsGradients) else ()
    return [*step.setup.processes.gradient_buckets(), *own]


def beside_batch(step: TrainStep, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that are on the device of the batch: shares of FSDP2 may be in host memory."""
    devices = {each.device.type for each in tensors_in(dict(step.batch))}
    return [each for each in tensors if not devices or each.device.type in devices]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield the storages behind tensors; for a DTensor, of this process's share."""
    return (plain.untyped_storage() for plain in plain_tensors(*tensors))


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of tensors."""
    return sum(storage.nbytes() for storage in {id(storage): storage for storage in storages(tensors)}.values())


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of real tensors."""
    return {storage.data_ptr() for storage in storages(tensors)}
