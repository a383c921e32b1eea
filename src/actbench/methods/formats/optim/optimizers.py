"""SGD, Adam and AdamW with packed state, in place of torch's of the same names."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from actbench.errors import UsageError
from actbench.methods.formats.encodings import Encoding
from actbench.methods.formats.ops.smaqstep import rules as steprules
from actbench.methods.formats.optim.base import Group, PackedOptimizer, Place, State, in_float32, write_back
from actbench.methods.formats.optim.loading import TORCHS_OWN, refuse_unsupported
from actbench.methods.formats.optim.storage import Storage

_SGD = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
_ADAM = ("betas", "eps", "weight_decay", "maximize")
_OPTIONS: Final[dict[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    torch.optim.SGD: ("lr", *_SGD),
    torch.optim.Adam: ("lr", *_ADAM),
    torch.optim.AdamW: ("lr", *_ADAM),
}
_DROPPED = TORCHS_OWN | {"params", "param_names"}


def _numbers(group: Group, *names: str) -> dict[str, Any]:
    return {"lr": float(group["lr"]), **{name: group[name] for name in names}}


class Adam(PackedOptimizer):
    """Adam (Kingma, Ba 2014, arXiv 1412.6980) with packed moments; the second one as its root.

    With ``smaq`` both take 1.625 bytes a parameter, where float32 takes 8. The second moment itself would not do on its
    linear scale: small ones become zero, and a first moment divided by them goes anywhere.

    Args:
        params: As in torch.
        lr: As in torch, as are the next three.
        betas: Decay of the first and of the second moment.
        eps: Added to the divisor.
        weight_decay: L2 penalty.
        maximize: As in torch.
        encoding: How the moments are stored; None for float32.
        seed: Of the noise of rounding. Replicas of a parallel run must have the same.

    Raises:
        ValueError: torch does not take such an option.
        UsageError: There is no such encoding, or it cannot hold state.
    """

    twin: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    moments: ClassVar[dict[str, str]] = {"exp_avg": "packed_exp_avg", "exp_avg_sq": "packed_root_exp_avg_sq"}
    roots: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        encoding: str | Encoding | None = "smaq",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, encoding, seed)

    def _update(self, p: Tensor, g: Tensor, group: Group, storage: Storage, state: State, at: Place) -> None:
        rule = steprules.adam_rule(at.step, decoupled=self.decoupled, **_numbers(group, *_ADAM))
        storage.adam(p, g, state["packed_exp_avg"], state["packed_root_exp_avg_sq"], at.seed, rule, at.first)

    def _step_others(self, parameters: list[Tensor], group: Group) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                # in host memory, as torch.optim keeps it
                state["step"] = torch.tensor(0.0, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        values, states = in_float32(parameters), [self.state[parameter] for parameter in parameters]
        numbers = _numbers(group, *_ADAM)
        beta1, beta2 = numbers.pop("betas")
        adam(
            values,
            in_float32(parameter.grad for parameter in parameters if parameter.grad is not None),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            # moments that amsgrad alone has
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            decoupled_weight_decay=self.decoupled,
            **numbers,
        )
        write_back(values, parameters)


class AdamW(Adam):
    """AdamW (Loshchilov, Hutter 2017, arXiv 1711.05101) with packed moments: :class:`Adam` with decoupled weight decay.

    Arguments and errors are those of :class:`Adam`; ``weight_decay`` is the coefficient of the decay.
    """

    twin: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        encoding: str | Encoding | None = "smaq",
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, encoding=encoding, seed=seed)


class SGD(PackedOptimizer):
    """SGD with a packed momentum buffer; without momentum there is nothing to pack, and it is torch's.

    With ``smaq`` the buffer takes 0.8125 bytes a parameter, where float32 takes 4.

    Args:
        params: As in torch.
        lr: As in torch, as are the next four.
        momentum: Of the buffer.
        dampening: Of the gradient that is added to it.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum.
        maximize: As in torch.
        encoding: How the buffer is stored; None for float32.
        seed: Of the noise of rounding. Replicas of a parallel run must have the same.

    Raises:
        ValueError: torch does not take such an option.
        UsageError: There is no such encoding, or it cannot hold state.
    """

    twin: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    moments: ClassVar[dict[str, str]] = {"momentum_buffer": "packed_momentum_buffer"}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        encoding: str | Encoding | None = "smaq",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**options, "nesterov": nesterov, "maximize": maximize}, encoding, seed)

    def _has_moments(self, group: Group) -> bool:
        return bool(group["momentum"] != 0)

    def _update(self, p: Tensor, g: Tensor, group: Group, storage: Storage, state: State, at: Place) -> None:
        rule = steprules.sgd_rule(at.step, **_numbers(group, *_SGD))
        storage.sgd(p, g, state["packed_momentum_buffer"], at.seed, rule, at.first)

    def _step_others(self, parameters: list[Tensor], group: Group) -> None:
        if not parameters:
            return
        values = in_float32(parameters)
        buffers = [self.state[p].get("momentum_buffer") for p in parameters] if group["momentum"] else []
        gradients = in_float32(parameter.grad for parameter in parameters if parameter.grad is not None)
        buffers = buffers or [None] * len(parameters)
        # sgd of torch.optim.sgd puts new buffers into the list where it finds None
        sgd(values, gradients, buffers, **_numbers(group, *_SGD))
        for parameter, buffer in zip(parameters, buffers, strict=True):
            if buffer is not None:
                self.state[parameter]["momentum_buffer"] = buffer
        write_back(values, parameters)


def packed(optimizer: torch.optim.Optimizer, encoding: str | Encoding = "smaq", *, seed: int = 0) -> PackedOptimizer:
    """Return the packed twin of an optimizer of torch: the same parameters in the same groups with the same options.

    The options ``foreach`` and ``fused`` are dropped; the updates are the same.

    Args:
        optimizer: A fresh ``torch.optim.SGD``, ``Adam`` or ``AdamW``, of exactly this class.
        encoding: How the state is stored.
        seed: Of the noise of rounding.

    Raises:
        UsageError: There is no twin of this optimizer; the message says why.
    """
    if isinstance(optimizer, SGD | Adam):
        raise UsageError("the optimizer's state is packed already")
    kind = type(optimizer)
    if kind not in _OPTIONS:
        known = ", ".join(other.__name__ for other in _OPTIONS)
        raise UsageError(
            f"there is no packed {kind.__module__}.{kind.__qualname__}; there are packed {known} of torch.optim"
        )
    check_fresh(optimizer, "pack a fresh optimizer, and load the state_dict() of this one into the packed optimizer")
    for group in optimizer.param_groups:
        refuse_unsupported(group)
    options = {name: optimizer.defaults[name] for name in _OPTIONS[kind]}
    groups = [_group(group) for group in optimizer.param_groups]
    twin = SGD if isinstance(optimizer, torch.optim.SGD) else AdamW if is_decoupled(optimizer) else Adam
    return twin(groups, **options, encoding=encoding, seed=seed)


def adam_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups of torch's Adam, with the options that Adam of other libraries takes too."""
    names = ("params", "lr", "betas", "eps", "weight_decay")
    return [{name: group[name] for name in names} for group in optimizer.param_groups]


def is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's Adam is AdamW, whose weight decay is decoupled; a UsageError if groups differ in that."""
    decoupled = {bool(group["decoupled_weight_decay"]) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise UsageError("decoupled_weight_decay differs between groups; make them two optimizers, Adam and AdamW")
    return decoupled.pop()


def check_fresh(optimizer: torch.optim.Optimizer, instead: str) -> None:
    """Refuse an optimizer of torch that has state, a scheduler or hooks, which a replacement would not have.

    Raises:
        UsageError: It has state, and the message says what to do ``instead``; or a scheduler or hooks of steps.
    """
    if optimizer.state:
        raise UsageError(f"the optimizer has state already; {instead}")
    # LRScheduler.__init__ leaves this key in each group
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError(
            "a scheduler holds on to the optimizer already; make the scheduler afterwards, of the new optimizer"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError("hooks of steps are registered already; register them afterwards, on the new optimizer")


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group as the twin takes it; what the user has put into it is kept."""
    parameters = group["params"]
    if "param_names" in group:
        parameters = list(zip(group["param_names"], parameters, strict=True))
    return {**{key: value for key, value in group.items() if key not in _DROPPED}, "params": parameters}
