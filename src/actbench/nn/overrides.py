"""Functions of torch that are replaced while a model runs, wherever and however the model calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Rules = Mapping[Callable[..., Any], Callable[..., Any]]
"""From a function of torch to what takes its place: same arguments, by place and by name, and same result."""

_internals: Any = torch._C


class Intercepted(TorchFunctionMode):
    """Replaces functions of torch by rules, inside of a with-block and in the thread that entered it.

    A function is seen where the model calls it, and not inside of another function of torch: of ``nn.ReLU`` it is
    ``F.relu`` that is seen, and of ``F.multi_head_attention_forward`` the whole. A replacement runs outside of this
    and of every other mode for functions. Tensor subclasses that define functions of their own keep theirs.

    One object may be entered several times, at once and in several threads. What runs again in the backward pass does
    so outside: non-re-entrant checkpointing inside of the block needs it as ``context_fn``.

    Args:
        rules: What is replaced.
        only_if: Asked before each replacement; None for always.
    """

    def __init__(self, rules: Rules, only_if: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.rules, self._only_if = rules, only_if

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, or what replaces it."""
        rule = self.rules.get(func)
        if rule is None or (types and _has_own_functions(types)) or not (self._only_if is None or self._only_if()):
            return func(*args, **kwargs) if kwargs else func(*args)
        with _internals.DisableTorchFunction():
            return rule(*args, **kwargs) if kwargs else rule(*args)


def _has_own_functions(types: tuple[type[Any], ...]) -> bool:
    disabled = _internals._disabled_torch_function_impl  # that of parameters and fake tensors
    return any(kind is not Tensor and kind.__torch_function__ is not disabled for kind in types)
