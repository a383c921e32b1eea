"""What one scheme of a composition alone may change, in words that go on from ``they``; see ``Scheme.exclusive``."""

from __future__ import annotations

from typing import Final

SAVED_TENSORS: Final = "pack or move saved tensors by hooks, of which only the innermost run"
ACTIVATIONS: Final = "replace activation layers"
