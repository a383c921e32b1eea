"""Answers about a card that libraries cache: forgotten when a simulated card comes, and when it goes."""

from __future__ import annotations

import functools
import sys

_ASK_ONCE = ("accelerate", "bitsandbytes", "diffusers", "lightning", "peft", "pytorch_lightning", "transformers", "trl")
"""Libraries with cached functions such as ``is_torch_cuda_available``."""


def forget() -> None:
    """Clear the caches of functions of libraries that are imported."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _ASK_ONCE:
            values = list(getattr(module, "__dict__", {}).values())
            if functools._lru_cache_wrapper in map(type, values):  # not so in most of thousands of modules
                for value in values:
                    if isinstance(value, functools._lru_cache_wrapper):
                        value.cache_clear()
