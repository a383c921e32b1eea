"""Caches of keys and values that transformers passes to its blocks, known by name so that it need not be imported."""

from __future__ import annotations

import copy
from typing import Any

from actbench.errors import ConversionError

_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")  # these make new tensors when they grow


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers."""
    return any(cls.__name__ == "Cache" and cls.__module__.startswith("transformers") for cls in type(value).__mro__)


def is_empty(cache: Any) -> bool:
    """Return whether no layer of a cache holds anything."""
    return not any(is_cache(part) and not is_empty(part) for part in vars(cache).values()) and not any(
        _is_filled(layer) for layer in _layers(cache)
    )


def copied(value: Any) -> Any:
    """Return a cache with the same tensors that can be filled without filling this one; any other value as it is.

    Raises:
        ConversionError: A filled layer of the cache writes into its tensors.
    """
    if not is_cache(value):
        return value
    for layer in _layers(value):
        if _is_filled(layer) and type(layer).__name__ not in _GROWING:
            raise ConversionError(
                f"checkpoint: a block was given a filled {type(value).__name__} of {type(layer).__name__}, into which "
                "its second run would write again; in training give a DynamicCache, or none"
            )
    twin = _own_tables(value)
    vars(twin).update({name: copied(part) for name, part in vars(value).items() if is_cache(part)})
    if "layers" in vars(value):
        twin.layers = [_own_tables(layer) for layer in value.layers]
    return twin


def _layers(cache: Any) -> list[Any]:
    return list(vars(cache).get("layers", ()))  # a cache for encoder and decoder has none, but two caches


def _is_filled(layer: Any) -> bool:
    if getattr(layer, "is_initialized", False) and layer.get_seq_length() > 0:
        return True
    return any(getattr(layer, "has_previous_state", {}).values())  # of linear attention, one entry for each state


def _own_tables(holder: Any) -> Any:
    """Return a shallow copy whose dictionaries are its own."""
    twin = copy.copy(holder)
    vars(twin).update({name: dict(part) for name, part in vars(holder).items() if isinstance(part, dict)})
    return twin
