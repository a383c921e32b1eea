"""Marks of tests that do the same with one model after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def slow_or_exhaustive(values: Iterable[T], is_further: Callable[[T], bool]) -> list[Any]:
    """Return parameters of slow tests, and of exhaustive ones those that are further examples of a kind."""
    return [
        pytest.param(value, marks=pytest.mark.exhaustive if is_further(value) else pytest.mark.slow) for value in values
    ]
