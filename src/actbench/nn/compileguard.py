"""Refusing to be compiled, for what stands on storages, hooks and values of the host."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from actbench.errors import ConversionError

_eval_frame: Any = torch._C._dynamo.eval_frame


def refuse_compiling(what: str, why: str) -> None:
    """Raise a ConversionError under ``torch.compile``.

    An exception while it traces only makes it run the forward uncompiled, and compile what that calls. So it is asked
    too whether it waits for the frames that are called from here.

    Args:
        what: What cannot be compiled, such as "offload".
        why: Because of what, as the end of the sentence.

    Raises:
        ConversionError: This runs under ``torch.compile``.
    """
    if torch.compiler.is_compiling() or callable(_eval_frame.get_eval_frame_callback()):
        raise ConversionError(
            f"{what} cannot be compiled: {why}; use it without torch.compile, or fewbit or randomized with it"
        )


def refuse_compiled(module: nn.Module, what: str, why: str) -> None:
    """Raise a ConversionError for a model that is compiled, or holds a part that is, at once and not as it first runs.

    Args:
        module: The model.
        what: What cannot be compiled, such as "offload".
        why: Because of what, as the end of the sentence.

    Raises:
        ConversionError: It is.
    """
    for path, part in module.named_modules():
        if is_compiled(part):
            found = f"{path!r} of this {type(module).__name__}" if path else f"this {_inside(module)}"
            raise ConversionError(
                f"{found} is compiled by torch.compile, and {what} cannot be: {why}; convert the model without "
                "torch.compile, or take fewbit or randomized with it"
            )


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what ``torch.compile`` returns, or was compiled in place by ``module.compile()``."""
    frame = sys.modules.get("torch._dynamo.eval_frame")  # where nobody has imported the compiler, nothing is compiled
    returned = frame is not None and isinstance(module, frame.OptimizedModule)
    return returned or vars(module).get("_compiled_call_impl") is not None


def _inside(module: nn.Module) -> str:
    return type(getattr(module, "_orig_mod", module)).__name__
