"""LBFGS of torch without values: it goes on while losses change, and its history grows with each iteration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import lbfgs

from actbench.device.patches import replaced

_NEVER = -1.0
"""Tolerance with which no step ends early. LBFGS ends one whose slope, taken for 1, is above minus the tolerance."""

_FIRST = -1.0
"""The constant of Wolfe's second condition with which the first point of a line search is accepted, if slopes are 1."""


@contextmanager
def all_iterations() -> Iterator[None]:
    """Inside the block, let LBFGS run all of its iterations, with one evaluation for each line search.

    Unknown losses and slopes are taken for 1 (:mod:`actbench.tools.script.values.placeholders`), so nothing would ever
    change.
    """

    def patient(own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def init(self: torch.optim.LBFGS, *args: Any, **options: Any) -> None:
            own(self, *args, **options)
            for group in self.param_groups:
                group["tolerance_change"] = _NEVER

        return init

    def accepting(search: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(search, c2=_FIRST)

    with replaced(torch.optim.LBFGS, "__init__", patient), replaced(lbfgs, "_strong_wolfe", accepting):
        yield
