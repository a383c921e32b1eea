"""Optimizers that wrap another optimizer, and what optimizers may do beyond those of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn, optim

from actbench.errors import ConversionError
from actbench.scheme.checks import innermost


def called(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of a step returns, which runs the model forward and backward; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class WrappedOptimizer(optim.Optimizer):
    """A wrapper of an optimizer, ``inner``, whose groups, state and ``state_dict`` are its own too.

    Class attributes: unscalable: Which gradients ``GradScaler`` cannot unscale. remedy: How else to train.
    """

    unscalable: ClassVar[str]
    remedy: ClassVar[str]
    _step_supports_amp_scaling = True  # GradScaler then leaves it to step() to unscale, which refuses

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and return what the closure returned.

        Raises:
            ConversionError: An enabled ``GradScaler`` steps this.
        """
        if hasattr(self, "found_inf"):
            raise ConversionError(
                f"GradScaler cannot unscale {self.unscalable}, and the step would use them too large by the scale of "
                f"the loss; train in bfloat16 without GradScaler, or {self.remedy}"
            )
        result = called(closure)
        self._step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside."""
        return self.inner.state_dict()

    def local_state_dict(self) -> dict[str, Any]:
        """Return what this process holds of the state of the optimizer inside."""
        found: dict[str, Any] = getattr(self.inner, "local_state_dict", self.inner.state_dict)()
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of the optimizer inside."""
        self.inner.load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside, whose gradients wait for :meth:`step` as they are."""
        if "inner" in vars(self):
            self.inner.add_param_group(param_group)
            self._share()
        else:
            super().add_param_group(param_group)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all groups."""
        for group in self.inner.param_groups:
            yield from group["params"]

    def _step(self) -> None:
        raise NotImplementedError

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


@runtime_checkable
class HoldsGradients(Protocol):
    """An optimizer that holds gradients itself, in a form of its own, while they wait for its step."""

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the gradients by parameter, as the step is given them."""
        ...

    def gradient_parts(self) -> Iterable[Tensor]:
        """Return the tensors that hold them, but those on the parameters themselves."""
        ...


@runtime_checkable
class StepsInBackward(Protocol):
    """An optimizer that steps each parameter as soon as a backward pass has made its gradient."""

    def hold(self) -> None:
        """Let gradients wait for ``step()`` from now on."""
        ...


@runtime_checkable
class HoldsShares(Protocol):
    """An optimizer that knows shares of parameters in place of the parameters of the model."""

    @property
    def wholes(self) -> Mapping[int, nn.Parameter]:
        """The parameters of the model, by the identity of their shares."""
        ...


@runtime_checkable
class Renews(Protocol):
    """An optimizer that makes a part of its state anew at intervals, in steps that need more memory than others."""

    def renew(self) -> None:
        """Let the next step of each parameter be such a step."""
        ...


def renews_next(optimizer: optim.Optimizer) -> bool:
    """Let the next step be one that makes state anew; return whether the optimizer has such steps."""
    inner = innermost(optimizer)
    if isinstance(inner, Renews):
        inner.renew()
    return isinstance(inner, Renews)


TRAIN_MODE: Final = "train_mode"
"""The option of a group that tells whether its parameters hold the weights to train; schedule-free ones have it."""


@runtime_checkable
class TrainsElsewhere(Protocol):
    """An optimizer that trains other weights than those to evaluate; the parameters hold either.

    Its groups may tell by ``TRAIN_MODE`` which weights the parameters hold.
    """

    def train(self) -> None:
        """Put the weights to train into the parameters."""
        ...

    def eval(self) -> None:
        """Put the weights to evaluate into the parameters."""
        ...


@contextmanager
def evaluated_weights(optimizer: optim.Optimizer) -> Iterator[None]:
    """Inside the block, let parameters hold the weights to evaluate, if the optimizer trains others.

    After the block they hold what they held before it; the weights to train, if the optimizer does not tell which.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, TrainsElsewhere):
        yield
        return
    was_training = all(group.get(TRAIN_MODE, True) for group in inner.param_groups)
    inner.eval()
    try:
        yield
    finally:
        if was_training:
            inner.train()
