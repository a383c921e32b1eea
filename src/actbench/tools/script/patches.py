"""Attributes of torch that are replaced for a while."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from actbench.simulator.overrides import attribute


class Patches(ExitStack):
    """Replaced attributes of modules and classes; leaving the block gives each owner back what it had."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Give ``owner`` the attribute ``name``, which it may lack so far."""
        self.enter_context(attribute(owner, name, value))

    def replace(self, owner: Any, **values: Any) -> None:
        """Replace those attributes that ``owner`` has; what this version of torch lacks stays away."""
        for name, value in values.items():
            if hasattr(owner, name):
                self.set(owner, name, value)
