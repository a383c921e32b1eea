"""Caches of keys and values that a script's models fill while they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from actbench.tools.script.libraries.importpatches import Change, changed


def caches_noted(note: Callable[[list[Tensor]], object]) -> dict[str, Change]:
    """Return the change of transformers that notes the tensors of a cache's layer after each update of it."""

    def noting(own: Callable[..., Any]) -> Callable[..., Any]:
        def update(cache: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(cache, *args, **kwargs)
            layer = cache.layers[kwargs.get("layer_idx", args[2] if len(args) > 2 else -1)]
            held = tree_leaves(list(vars(layer).values()))
            note([each for each in held if isinstance(each, Tensor) and each.dim()])
            return result

        return update

    return {"transformers.cache_utils": lambda module: changed(module.Cache, "update", noting)}
