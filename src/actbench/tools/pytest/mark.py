"""The mark of a test, and what is wrong with it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest import TestCase

import pytest

from actbench.errors import UsageError
from actbench.simulator import profiles
from actbench.units import format_bytes, parse_bytes

MARK = "gpu_memory"
_EXAMPLE = f'@pytest.mark.{MARK}(device="rtx-4090", limit="20 GiB")'


@dataclass(frozen=True)
class Asked:
    """What a mark asks for.

    Attributes:
        profile: The card.
        limit: The limit as it was written; None for what a CUDA context leaves of the card.
        limit_bytes: The limit in bytes.
    """

    profile: profiles.DeviceProfile
    limit: str | None
    limit_bytes: int | None


def asked_of(item: pytest.Item) -> Asked:
    """Return what the mark of a test asks for.

    Raises:
        UsageError: An argument is missing, unknown or cannot be used, or a test of this kind cannot be simulated.
    """
    mark = item.get_closest_marker(MARK)
    assert mark is not None
    _check_kind(item)
    if mark.args:
        raise UsageError(f"{MARK}: {mark.args[0]!r} has no name; write {_EXAMPLE}")
    if unknown := sorted(mark.kwargs.keys() - {"device", "limit"}):
        raise UsageError(f"{MARK}: it has no argument {unknown[0]!r}; write {_EXAMPLE}")
    device, limit = mark.kwargs.get("device"), mark.kwargs.get("limit")
    if not isinstance(device, str):
        raise UsageError(f"{MARK}: device={device!r}: name a card ('actbench devices' lists them); write {_EXAMPLE}")
    profile = _profile(device)
    if limit is None:
        return Asked(profile, None, None)
    if not isinstance(limit, str):
        raise UsageError(f'{MARK}: limit={limit!r}: write a number with its unit as a text, such as "20 GiB"')
    try:
        found = parse_bytes(limit)
    except UsageError as error:
        raise UsageError(f"{MARK}: limit={error}") from None
    if found > profile.memory_bytes:
        has = format_bytes(profile.memory_bytes)
        raise UsageError(f"{MARK}: limit={limit!r} is more than {device} has, {has}: name a smaller limit, or none")
    return Asked(profile, limit, found)


def problems(items: Iterable[pytest.Item]) -> list[str]:
    """Return what is wrong with the marks of tests, a line for each test."""
    found = []
    for item in items:
        try:
            asked_of(item)
        except UsageError as error:
            found.append(f"{item.nodeid}: {error}")
    return found


def _profile(device: str) -> profiles.DeviceProfile:
    try:
        return profiles.get(device)
    except UsageError as error:
        raise UsageError(f"{MARK}: {str(error).replace('--device-profile ', 'device=')}") from None


def _check_kind(item: pytest.Item) -> None:
    """Raise a UsageError for a test whose body pytest does not run once as a plain function."""
    function: Any = getattr(item, "function", None)
    if not isinstance(item, pytest.Function) or (isinstance(item.cls, type) and issubclass(item.cls, TestCase)):
        raise UsageError(f"{MARK}: only functions and methods of plain classes run on a simulated card: make it one")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{MARK}: an async test cannot run on a simulated card: let the test train without async")
    if getattr(function, "is_hypothesis_test", False):
        raise UsageError(f"{MARK}: a test of hypothesis runs many times, and a measured one once: use parametrize")
