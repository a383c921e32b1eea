"""Under whose hooks a model runs."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actbench.nn.hooked.hooks import Hooks

_active: ContextVar[Hooks | None] = ContextVar("_active", default=None)


def active() -> Hooks | None:
    """Return the hooks of the innermost model that is running under some in this thread, or None."""
    return _active.get()


def begin(hooks: Hooks) -> Token[Hooks | None]:
    """Say that a model runs under hooks from now on; :func:`end` is given what this returns."""
    return _active.set(hooks)


def end(token: Token[Hooks | None]) -> None:
    """Say that it does no longer."""
    _active.reset(token)
