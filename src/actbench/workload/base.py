"""What all workloads share: the protocol, building a model, random inputs, and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from actbench.errors import ModelError
from actbench.model.modelspecs import DTYPE
from actbench.model.records import Case
from actbench.scheme.conditions import Precision
from actbench.scheme.microbatches import IGNORED_LABEL, Batch
from actbench.scheme.setup import Loss, MakeOptimizer, TrainingSetup
from actbench.workload.optimizers import make_optimizer


class Workload(Protocol):
    """A model, its scalar loss, and how to make a batch of any size.

    Attributes:
        spec: The model specification of the user.
        weights_origin: ``random``, ``pretrained:NAME``, ``folder:PATH``, ``function``, or ``not loaded (shapes only)``;
            known after :meth:`setup`.
        warnings: What a user must know about the origin of the model; known after :meth:`setup`.
        longest: Most tokens that the model can read; None if there is no such number.
    """

    spec: str
    weights_origin: str = "random"
    warnings: tuple[str, ...] = ()
    longest: int | None = None

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the model in training mode with its loss and optimizer.

        If ``materialize`` is False, only shapes are wanted: parameters may be on the meta device.

        Raises:
            ModelError: The model cannot be found, read or built.
        """

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make a batch on the CPU, or of fake tensors when a fake tensor mode is active."""


_DRAWS = ("normal_", "uniform_", "kaiming_uniform_")  # by name: transformers has its own in the place of torch's


class EmptyOnMeta(TorchFunctionMode):
    """Put the results of ``torch.empty`` on the meta device, and nothing else.

    Layers make their weights by ``torch.empty`` and then initialise them, so a model built under this mode costs
    neither memory nor time. Constructors that compute with small tensors work (RegNet reads its widths from a
    ``linspace``), and computed buffers have values; under ``torch.device("meta")`` neither does.

    No random numbers are drawn for tensors on the meta device: torch would run a program in Python for each of them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        if getattr(func, "__name__", None) in _DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


def float_type(case: Case) -> torch.dtype:
    """Return the dtype of a case, or the default."""
    dtype: torch.dtype = getattr(torch, case.dtype or DTYPE)
    return dtype


def setup_of(case: Case, module: nn.Module, loss: Loss, **fields: Any) -> TrainingSetup:
    """Return the setup of a case's model, with the optimizer and the autocast that the case names."""
    precision = Precision(autocast=getattr(torch, case.autocast) if case.autocast else None)
    make = make_optimizer(case.optimizer)
    return TrainingSetup(module=module, loss=loss, make_optimizer=make, precision=precision, **fields)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block and restore it afterwards."""
    # by default fork_rng saves the states of all CUDA devices, and warns where there are several
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def construct(make: Callable[[], nn.Module], *, materialize: bool, seed: int) -> nn.Module:
    """Build a module, seeded, in training mode.

    Without ``materialize`` the large parameters are on the meta device, uninitialised; tied parameters stay tied.
    """
    if not materialize:
        with EmptyOnMeta():
            return make().train()
    with seeded(seed):
        return make().train()


MASKED_SHARE = 0.15  # share of tokens that BERT's masked language modelling predicts


def generator(seed: int) -> torch.Generator:
    """Return a new CPU generator, so that batches do not use torch's global one."""
    return torch.Generator().manual_seed(seed)


def moved(batch: Batch, device: str | torch.device) -> Batch:
    """Return a batch with its tensors, in any nesting, on a device."""
    found: Batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, dict(batch))
    return found


def tokens(batch_size: int, length: int, vocabulary: int, excluded: Iterable[int], random: torch.Generator) -> Tensor:
    """Draw token ids ``(batch_size, length)`` int64 uniformly from a vocabulary without the excluded ids."""
    left_out = sorted({index for index in excluded if 0 <= index < vocabulary})
    ids = torch.randint(vocabulary - len(left_out), (batch_size, length), generator=random)
    for index in left_out:  # in ascending order: each pass skips one excluded id
        ids = ids + (ids >= index)
    return ids


def masked_labels(ids: Tensor, random: torch.Generator) -> Tensor:
    """Return labels ``(batch, length)`` int64: 15 % of the ids and the first of each row, the rest ignored."""
    kept = torch.rand(ids.shape, generator=random) < MASKED_SHARE
    # a row without a label would have a mean over nothing, which is NaN
    kept[:, 0] = True
    return torch.where(kept, ids, IGNORED_LABEL)


def classes(batch_size: int, count: int, random: torch.Generator) -> Tensor:
    """Draw labels ``(batch_size,)`` int64 from ``count`` classes."""
    return torch.randint(count, (batch_size,), generator=random)


def class_labels(config: Any, batch_size: int, random: torch.Generator) -> Tensor:
    """Draw class ids; for regression (one label) and for multi-label classification draw floats."""
    if config.problem_type == "multi_label_classification":
        return torch.rand(batch_size, config.num_labels, generator=random).round()
    if config.num_labels == 1 or config.problem_type == "regression":
        return torch.rand(batch_size, generator=random)
    return classes(batch_size, config.num_labels, random)


def images(
    batch_size: int, channels: int, size: tuple[int, int], dtype: torch.dtype, random: torch.Generator
) -> Tensor:
    """Draw images ``(batch_size, channels, height, width)`` from a standard normal, like normalised pictures."""
    return torch.randn(batch_size, channels, *size, generator=random).to(dtype)


def optimizer_as_given(
    optimizer: optim.Optimizer, module: nn.Module, twins: Mapping[Tensor, Tensor], spec: str
) -> MakeOptimizer:
    """Return a function that returns the given optimizer, each time reset to its first state.

    In place, its parameters are replaced by their twins: themselves, or their fake forms, which ``module`` has too.

    Raises:
        ModelError: The optimizer holds parameters that are not the model's.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [twins.get(parameter, parameter) for parameter in group["params"]]
    check_optimizer(optimizer, module, spec)
    for parameter in [parameter for parameter in optimizer.state if parameter in twins]:
        optimizer.state[twins[parameter]] = optimizer.state.pop(parameter)
    leaves, tree = tree_flatten(optimizer.state_dict() if optimizer.state else {})
    begun = [_again(leaf) for leaf in leaves]

    def give(module: nn.Module) -> optim.Optimizer:
        optimizer.state.clear()
        if begun:  # Adagrad, for one, has state before its first step; loading moves it to the model's device
            optimizer.load_state_dict(tree_unflatten([again() for again in begun], tree))
        return optimizer

    return give


def _again(leaf: Any) -> Callable[[], Any]:
    """Return a function that copies one leaf of the state; counters stay readable under a fake tensor mode."""
    if not isinstance(leaf, Tensor):
        return lambda: leaf
    if leaf.dim() or isinstance(leaf, FakeTensor):
        return leaf.clone
    number, dtype = leaf.item(), leaf.dtype
    return lambda: torch.tensor(number, dtype=dtype)


def optimizer_by(make: Callable[[nn.Module], Any], run: Callable[[Callable[[], Any]], Any], spec: str) -> MakeOptimizer:
    """Return a function that calls the user's ``make`` through ``run`` and checks the optimizer it returns."""

    def checked(module: nn.Module) -> optim.Optimizer:
        found = run(lambda: make(module))
        if not isinstance(found, optim.Optimizer):
            raise ModelError(
                f"{spec}: the fourth value, a function from the model to its optimizer, returned "
                f"{type(found).__name__}; it must return a torch.optim.Optimizer"
            )
        check_optimizer(found, module, spec)
        return found

    return checked


def check_optimizer(optimizer: optim.Optimizer, module: nn.Module, spec: str) -> None:
    """Raise a ModelError if an optimizer holds parameters that are not the model's."""
    own = set(module.parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in held if parameter not in own]
    if foreign:
        raise ModelError(
            f"{spec}: the {type(optimizer).__name__} that it returns holds {len(foreign)} of {len(held)} parameters "
            f"that are not of the model, the first of shape {tuple(foreign[0].shape)}; make it from "
            "model.parameters(), after the last change of the model"
        )
