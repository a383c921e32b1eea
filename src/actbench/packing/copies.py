"""Copies for a further run of a module: of its buffers, and of caches of keys and values.

The caches are those of transformers, checked by name so that transformers need not be imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from actbench.errors import ConversionError


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Give the code inside copies of a module's buffers, and throw away what it writes.

    The buffers themselves do not change, so that graphs of earlier passes find them unchanged. A buffer that is made
    inside stays; one that has a graph, or no memory yet, is not copied.
    """
    before = [(part, dict(part._buffers)) for part in module.modules()]
    copies: dict[Tensor, Tensor] = {}
    for part, buffers in before:
        for name, buffer in buffers.items():
            if buffer is not None and may_be_copied(buffer):
                part._buffers[name] = copy_of(buffer, copies)
    try:
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)


_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")  # these make new tensors when they grow


_PLAIN = (Tensor, tuple, list, dict, int, float, str, type(None))


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers."""
    if isinstance(value, _PLAIN):
        return False  # torch.compile cannot iterate over the classes of these
    return any(cls.__name__ == "Cache" and cls.__module__.startswith("transformers") for cls in type(value).__mro__)


def is_empty(cache: Any) -> bool:
    """Return whether no layer of a cache holds anything."""
    return not any(is_cache(part) and not is_empty(part) for part in vars(cache).values()) and not any(
        _is_filled(layer) for layer in _layers(cache)
    )


def copied(value: Any) -> Any:
    """Return a copy of a cache with the same tensors, which can be filled separately; any other value unchanged.

    Raises:
        ConversionError: A filled layer of the cache writes into its tensors.
    """
    if not is_cache(value):
        return value
    for layer in _layers(value):
        if _is_filled(layer) and type(layer).__name__ not in _GROWING:
            raise ConversionError(
                f"checkpoint: a block was given a filled {type(value).__name__} of {type(layer).__name__}, and its "
                "second run would write into that cache again; in training give a DynamicCache, or no cache"
            )
    twin = _own_tables(value)
    vars(twin).update({name: copied(part) for name, part in vars(value).items() if is_cache(part)})
    if "layers" in vars(value):
        twin.layers = [_own_tables(layer) for layer in value.layers]
    return twin


def _layers(cache: Any) -> list[Any]:
    return list(vars(cache).get("layers", ()))  # a cache for encoder and decoder has two caches and no layers


def _is_filled(layer: Any) -> bool:
    if getattr(layer, "is_initialized", False) and layer.get_seq_length() > 0:
        return True
    return any(getattr(layer, "has_previous_state", {}).values())  # linear attention, with one entry for each state


def _own_tables(holder: Any) -> Any:
    """Return a shallow copy with copied dictionaries."""
    twin = copy.copy(holder)
    vars(twin).update({name: dict(part) for name, part in vars(holder).items() if isinstance(part, dict)})
    return twin


def may_be_copied(buffer: Tensor) -> bool:
    """Return whether a buffer has memory and no graph."""
    return not buffer.requires_grad and not is_lazy(buffer)


def copy_of(buffer: Tensor, copies: dict[Tensor, Tensor]) -> Tensor:
    """Return the copy of a buffer, which several places may share."""
    if buffer not in copies:
        copies[buffer] = buffer.clone()
    return copies[buffer]
