"""The optimizers that cases and training runs name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from actbench.errors import UsageError
from actbench.model.modelspecs import OPTIMIZER
from actbench.model.records import Optimizer
from actbench.scheme.checks import refuse_frozen
from actbench.scheme.setup import MakeOptimizer

# Usual learning rates of fine-tuning; neither bytes nor seconds depend on them.
ADAM_RATE = 2e-5
SGD_RATE = 1e-2


def make_optimizer(name: Optimizer | None, **options: float) -> MakeOptimizer:
    """Return a function that makes the named optimizer (AdamW for None) for the trained parameters of a model."""
    kind, usual = _OPTIMIZERS[name or OPTIMIZER]
    return lambda module: kind(module, **{**usual, **options})


def same_updates(name: Optimizer | None) -> tuple[Optimizer, ...]:
    """Return the optimizers whose updates equal the named one's to rounding, but use other operators."""
    name = name or OPTIMIZER
    return tuple(other for twins in _TWINS if name in twins for other in twins if other != name)


def code_of(name: Optimizer, parameters: str, rate: str) -> str:
    """Return Python code that makes the named optimizer; ``parameters`` and ``rate`` are code too."""
    if name not in _CODE:  # it needs the model to divide the parameters between its two optimizers
        return f'actbench.workload.optimizers.make_optimizer("{name}", lr={rate})(model)'
    made, options = _CODE[name]
    return f"{made}({parameters}, lr={rate}{options})"


def _trained(module: nn.Module) -> list[nn.Parameter]:
    refuse_frozen(module)
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _of_all(kind: Callable[..., optim.Optimizer], module: nn.Module, **options: Any) -> optim.Optimizer:
    return kind(_trained(module), **options)


class _AnyNumber(TorchFunctionMode):
    """Let fake tensors of one element be read; their value is 1.0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.item and isinstance(args[0], FakeTensor):
            return 1.0
        return func(*args, **(kwargs or {}))


class Adafactor(optim.Adafactor):
    """torch's Adafactor, made to step fake tensors too: it reads norms, and no number of bytes depends on these."""

    def step(self, closure: Any = None) -> Any:
        """Step, as in torch."""
        with _AnyNumber():
            return super().step(closure)  # type: ignore[no-untyped-call]


class Muon(optim.Optimizer):
    """``torch.optim.Muon`` for hidden matrices and ``torch.optim.AdamW`` for the rest, as one optimizer of two groups.

    Muon's rate is scaled so that one rate fits both (Liu et al. 2025, arXiv 2502.16982).

    Args:
        matrices: Two-dimensional parameters.
        others: The rest; may be empty.
        options: ``lr`` and ``weight_decay``, as in torch.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], **options: Any) -> None:
        parts: list[optim.Optimizer] = [optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)]
        if others:
            parts.append(optim.AdamW(others, **options))
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both, as in torch."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for part in self._parts:
            part.step()
        return result

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of both, as in torch."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # schedulers and checkpoints change the groups and the state of this object, which both parts must see
            part.param_groups, part.state = [group], self.state


def _muon(module: nn.Module, **options: Any) -> optim.Optimizer:
    matrices = hidden_matrices(module)
    if not matrices:
        raise UsageError(
            f"muon: {type(module).__name__} has no matrix to train between its first and last layer; take adamw"
        )
    return Muon(matrices, [each for each in _trained(module) if each not in set(matrices)], **options)


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices except embeddings and the head, for which Muon is not meant.

    The head is the output embedding of a transformers model, or else the last linear layer.
    """
    own: Any = getattr(module, "get_output_embeddings", None)
    head = own() if callable(own) else None
    if head is None:
        head = next((part for part in reversed(list(module.modules())) if isinstance(part, nn.Linear)), None)
    outer = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) or part is head]
    left_out = {parameter for part in outer for parameter in part.parameters()}
    return [each for each in _trained(module) if each.dim() == 2 and each not in left_out]


_OPTIMIZERS: dict[Optimizer, tuple[Callable[..., optim.Optimizer], dict[str, Any]]] = {
    "adamw": (partial(_of_all, optim.AdamW), {"lr": ADAM_RATE}),
    "adamw-fused": (partial(_of_all, optim.AdamW), {"lr": ADAM_RATE, "fused": True}),
    "adamw-loop": (partial(_of_all, optim.AdamW), {"lr": ADAM_RATE, "foreach": False}),
    "adam": (partial(_of_all, optim.Adam), {"lr": ADAM_RATE}),
    "adafactor": (partial(_of_all, Adafactor), {"lr": ADAM_RATE}),
    "muon": (_muon, {"lr": ADAM_RATE}),
    "sgd": (partial(_of_all, optim.SGD), {"lr": SGD_RATE}),
    "sgd-momentum": (partial(_of_all, optim.SGD), {"lr": SGD_RATE, "momentum": 0.9}),
    "sgd-nesterov": (partial(_of_all, optim.SGD), {"lr": SGD_RATE, "momentum": 0.9, "nesterov": True}),
}

_TWINS: tuple[tuple[Optimizer, ...], ...] = (("adamw", "adamw-fused"),)

TRAINERS: dict[Optimizer, str] = {"adamw": "adamw_torch", "adamw-fused": "adamw_torch_fused"}
"""Names in transformers' ``TrainingArguments(optim=…)`` of the optimizers that are the same there."""

_CODE: dict[Optimizer, tuple[str, str]] = {
    "adamw": ("torch.optim.AdamW", ""),
    "adamw-fused": ("torch.optim.AdamW", ", fused=True"),
    "adamw-loop": ("torch.optim.AdamW", ", foreach=False"),
    "adam": ("torch.optim.Adam", ""),
    "adafactor": ("torch.optim.Adafactor", ""),
    "sgd": ("torch.optim.SGD", ""),
    "sgd-momentum": ("torch.optim.SGD", ", momentum=0.9"),
    "sgd-nesterov": ("torch.optim.SGD", ", momentum=0.9, nesterov=True"),
}
