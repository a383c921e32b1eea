"""What one scheme of a composition alone may change."""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

SAVED_TENSORS: Final = "pack or move saved tensors by hooks, of which only the innermost run (gact:L3 does both)"
ACTIVATIONS: Final = "replace activation layers"


@runtime_checkable
class Exclusive(Protocol):
    """A scheme beside which no other may change the same, whatever the model."""

    @property
    def exclusive(self) -> tuple[str, ...]:
        """What it does, in words that go on from ``they``."""
        ...


def common(first: object, second: object) -> str | None:
    """Return what two schemes would both do and only one may, or None where they can stand together."""
    if not (isinstance(first, Exclusive) and isinstance(second, Exclusive)):
        return None
    return next((what for what in first.exclusive if what in second.exclusive), None)
