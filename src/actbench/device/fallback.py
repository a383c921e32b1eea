"""Run operators that have no fake form on zeros in host memory, to learn the shapes of their results.

torch does so on the device of the arguments, which for a simulated card is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from actbench.device.patches import attribute
from actbench.errors import SPARSE, UntraceableError

_HOST = torch.device("cpu")


@contextmanager
def fallbacks_on_host() -> Iterator[None]:
    """Inside the block, let operators on fake tensors of any device fall back to host memory."""
    with (
        attribute(fake_tensor, "run_fallback_kernel", _run_on_zeros),
        attribute(fake_impls, "run_fallback_kernel", _run_on_zeros),
    ):
        yield


def _run_on_zeros(
    mode: FakeTensorMode, func: Any, flat_args: Sequence[Any], tree: Any, error: RuntimeError, *_: Any
) -> Any:
    """Run an operator; ``error`` is raised if it changes shapes, or returns a view of what it was given."""
    if torch.Tag.inplace_view in func.tags:
        raise error
    written = _written(func, *tree_unflatten(list(flat_args), tree))
    if written is not None:
        return written
    given = dict[int, FakeTensor]()
    storages = set[int]()
    device = next((leaf.device for leaf in flat_args if isinstance(leaf, FakeTensor)), _HOST)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return _HOST
        if not mode.is_our_fake(leaf):
            return leaf
        # zeros, whose values are in range for an index, a length or a probability
        made = torch.zeros_like(leaf, device=_HOST)
        given[id(made)] = leaf
        storages.add(made.untyped_storage()._cdata)
        return made

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in given:
            return given[id(leaf)]
        if leaf.untyped_storage()._cdata in storages:
            raise error
        with mode:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

    with torch._C._DisableTorchDispatch():
        args, kwargs = tree_unflatten(list(map(real, flat_args)), tree)
        found = func(*args, **kwargs)
    _refuse_sparse(found)
    return tree_map(fake, found)


def _refuse_sparse(found: Any) -> None:
    """Raise an UntraceableError if a result has as many elements as its operator found, of zeros."""
    if any(isinstance(each, Tensor) and each.layout is not torch.strided for each in tree_leaves(found)):
        raise UntraceableError(SPARSE)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the argument into which an operator writes its only result, as ``out``; None for others."""
    schema = func._schema
    if len(schema.returns) != 1 or (alias := schema.returns[0].alias_info) is None or not alias.is_write:
        return None
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            return kwargs[argument.name] if argument.name in kwargs else args[place]
    return None
