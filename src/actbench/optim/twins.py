from __future__ import annotations

from typing import Any, Final

import torch

from actbench.codecs.encodings import Encoding
from actbench.errors import UsageError
from actbench.optim.adam import Adam, AdamW
from actbench.optim.base import TORCHS_OWN, PackedOptimizer, refuse_unsupported
from actbench.optim.sgd import SGD

_OPTIONS: Final[dict[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    torch.optim.SGD: ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    torch.optim.Adam: ("lr", "betas", "eps", "weight_decay", "maximize"),
    torch.optim.AdamW: ("lr", "betas", "eps", "weight_decay", "maximize"),
}
_DROPPED = TORCHS_OWN | {"params", "param_names"}


def packed(optimizer: torch.optim.Optimizer, encoding: str | Encoding = "smaq", *, seed: int = 0) -> PackedOptimizer:
    """Return the packed twin of an optimizer of torch: the same parameters in the same groups with the same options.

    How torch was told to compute, ``foreach`` or ``fused``, is forgotten; the updates are the same.

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
        raise UsageError(f"there is no packed {kind.__module__}.{kind.__qualname__}; packed are {known} of torch.optim")
    _check_fresh(optimizer)
    for group in optimizer.param_groups:
        refuse_unsupported(group)
    options = {name: optimizer.defaults[name] for name in _OPTIONS[kind]}
    groups = [_group(group) for group in optimizer.param_groups]
    return _twin(optimizer)(groups, **options, encoding=encoding, seed=seed)


def _twin(optimizer: torch.optim.Optimizer) -> type[SGD] | type[Adam]:
    if isinstance(optimizer, torch.optim.SGD):
        return SGD
    decoupled = {bool(group["decoupled_weight_decay"]) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise UsageError("decoupled_weight_decay differs between groups; make them two optimizers, Adam and AdamW")
    return AdamW if decoupled.pop() else Adam


def _check_fresh(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise UsageError(
            "the optimizer has state already; pack a fresh one, and load this one's state_dict() into what you get"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError("a scheduler holds on to the optimizer already; make it afterwards, of what you get")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError("hooks of steps are registered already; register them afterwards, on what you get")


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group as the twin takes it; what the user has put into it is kept."""
    parameters = group["params"]
    if "param_names" in group:
        parameters = list(zip(group["param_names"], parameters, strict=True))
    return {**{key: value for key, value in group.items() if key not in _DROPPED}, "params": parameters}
