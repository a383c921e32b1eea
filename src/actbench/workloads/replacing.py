"""Putting something else in the place of what a library looks up by name, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Put what ``change`` makes of an attribute in its place inside the block; one that is not there stays away."""
    if not hasattr(owner, name):
        yield
        return
    own = getattr(owner, name)
    setattr(owner, name, change(own))
    try:
        yield
    finally:
        setattr(owner, name, own)
