from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from actbench import defaults
from actbench.records import Case


class EmptyOnMeta(TorchFunctionMode):
    """Put what ``torch.empty`` makes on the meta device, and nothing else.

    Layers make their weights by ``torch.empty`` and then initialise them, so a model built under this mode costs
    neither memory nor time. Under ``torch.device("meta")`` constructors that compute with small tensors fail
    (RegNet reads its widths out of a ``linspace``) and computed buffers lose their values; here both work.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, on the meta device if it is ``torch.empty``."""
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def float_type(case: Case) -> torch.dtype:
    """Return the type that a case asks for, or what actbench builds models in where it asks for none."""
    dtype: torch.dtype = getattr(torch, case.dtype or defaults.DTYPE)
    return dtype


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block and leave it as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def construct(make: Callable[[], nn.Module], *, materialize: bool, seed: int) -> nn.Module:
    """Build a module by ``make``, in training mode.

    Args:
        make: Calls the constructor of the model.
        materialize: False leaves the large parameters on the meta device, uninitialised; ties between parameters
            hold all the same.
        seed: Seeds the random initialisation.
    """
    if not materialize:
        with EmptyOnMeta():
            return make().train()
    with seeded(seed):
        return make().train()
