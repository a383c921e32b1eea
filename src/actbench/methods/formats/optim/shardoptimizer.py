"""An optimizer of what one process of several holds of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn, optim

from actbench.errors import ConversionError
from actbench.methods.formats.optim.storage import mark_as_share
from actbench.scheme.wrapped import TrainsElsewhere, WrappedOptimizer

_ELEMENT_BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD")


class Shards(Protocol):
    """How a process holds a share of each parameter."""

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the share of a parameter, over the parameter's own memory."""
        ...

    def of_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the share of a parameter's gradient; None where there is none."""
        ...

    def stepped(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called after a step that changed the shares of some parameters."""
        ...


@dataclass(frozen=True)
class _Share:
    """A parameter, and the one that the optimizer inside knows in its place."""

    whole: nn.Parameter
    part: nn.Parameter


class ShardOptimizer(WrappedOptimizer):
    """Steps the shards of parameters that this process holds, by an optimizer for these shards alone.

    Groups and state are those of the shares; gradients are taken from the parameters, and freed there.

    Args:
        make: From a module to an optimizer of its parameters.
        module: The module whose parameters are replaced by their shares, under the same names, while ``make`` runs.
        shards: What the shares are.

    Raises:
        ConversionError: The optimizer does not treat each element of a parameter by itself.
    """

    unscalable: ClassVar[str] = "gradients of shares of parameters"
    remedy: ClassVar[str] = "do without shares of optimizer state"

    def __init__(self, make: Callable[[nn.Module], optim.Optimizer], module: nn.Module, shards: Shards) -> None:
        self._shards = shards
        with _replaced(module, shards) as shares:
            inner = make(module)
        held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
        self._shares = [share for share in shares if id(share.part) in held]
        super().__init__(inner)

    @property
    def wholes(self) -> Mapping[int, nn.Parameter]:
        """The parameters, by the identity of their shares."""
        return {id(share.part): share.whole for share in self._shares}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for share in self._shares:
            share.part.grad = None
            if set_to_none:
                share.whole.grad = None
            elif share.whole.grad is not None:
                share.whole.grad.zero_()

    def _step(self) -> None:
        stepped = []
        for share in self._shares:
            share.part.grad = self._shards.of_gradient(share.whole)
            if share.part.grad is not None:
                stepped.append(share.whole)
        self.inner.step()
        for share in self._shares:
            share.part.grad = None
        self._shards.stepped(stepped)


def by_element(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer updates each element of a parameter, or a block of elements, by itself."""
    kind = type(_innermost(optimizer))
    if kind.__module__.startswith("torch.optim."):
        return kind.__name__ in _ELEMENT_BY_ELEMENT
    # those of plug-ins; Muon, in the core, needs whole matrices
    return kind.__module__.startswith(("actbench.methods.", "torchao.", "bitsandbytes."))


def _innermost(optimizer: optim.Optimizer) -> optim.Optimizer:
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    return optimizer


def refuse_unshared(optimizer: optim.Optimizer, who: str) -> None:
    """Raise a ConversionError, told by ``who``, for an optimizer that steps or evaluates whole parameters."""
    inner = _innermost(optimizer)
    name = type(inner).__name__
    if not by_element(optimizer):
        raise ConversionError(
            f"{who}: {name} updates a parameter as a whole, as far as actbench knows, and a process holds only the "
            "state of a share of each parameter: take adamw, adam or sgd"
        )
    if isinstance(inner, TrainsElsewhere):
        raise ConversionError(
            f"{who}: {name} puts averaged weights into the parameters to evaluate, and a process would do so with its "
            "own share alone: take adamw, or ddp in place of zero1"
        )


@contextmanager
def _replaced(module: nn.Module, shards: Shards) -> Iterator[list[_Share]]:
    """Put the shares of a module's parameters in their places inside the block."""
    tables = [(part._parameters, dict(part._parameters)) for part in module.modules()]
    shares: dict[int, _Share] = {}
    try:
        for table, before in tables:
            for name, parameter in before.items():
                if parameter is not None:
                    table[name] = _share(parameter, shards, shares).part
        yield list(shares.values())
    finally:
        for table, before in tables:
            table.update(before)


def _share(parameter: nn.Parameter, shards: Shards, known: dict[int, _Share]) -> _Share:
    if id(parameter) not in known:
        with torch.no_grad():
            part = nn.Parameter(shards.of(parameter), requires_grad=parameter.requires_grad)
        mark_as_share(part, parameter.shape)
        known[id(parameter)] = _Share(parameter, part)
    return known[id(parameter)]
