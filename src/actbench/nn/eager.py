"""Refusing to be compiled, for what stands on storages, hooks and values of the host."""

from __future__ import annotations

from typing import Any

import torch

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
