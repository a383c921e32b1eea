"""Bounds of the counts in a model's config, which its constructor makes lists and modules of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from actbench.errors import ModelError

_BOUNDS: Final = (
    (re.compile(r"labels|classes"), 1_000_000),  # extreme classification has 670,000
    (re.compile(r"layer|block(?!_size)|stage|depth|expert|predict"), 100_000),
    (re.compile(r"(?:^|_)(?:num|n)_"), 10_000_000),
)
"""The most that an integer may be by its name; the first name that is found counts."""


def check_counts(config: Mapping[str, Any], place: str) -> None:
    """Check the counts in a config and in those inside it, before a constructor sees them.

    Other integers, such as sizes, are those of tensors; torch refuses what does not fit the memory.

    Raises:
        ModelError: One is larger than that of any model; ``place`` says where.
    """
    for name, value in _integers(config, ""):
        most = next((most for pattern, most in _BOUNDS if pattern.search(name)), None)
        if most is not None and value > most:
            raise ModelError(f"{place}: {name} is {value:,}, and may be {most:,} at most; correct the config")


def _integers(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the integers of a config, at any depth, with the names that they have there."""
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, each) for each in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value
