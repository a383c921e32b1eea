"""What the shell completes: values of options and arguments, found without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from actbench import plugins
from actbench.model import declared
from actbench.model.records import Optimizer


def schemes(incomplete: str) -> list[str]:
    """Return specifications that begin as typed, where the last scheme of several is completed."""
    before, plus, last = incomplete.rpartition("+")
    return [f"{before}{plus}{name}" for name in sorted(plugins.installed("schemes")) if name.startswith(last)]


def device_profiles(incomplete: str) -> list[str]:
    """Return the names of device profiles that begin as typed."""
    return _beginning(declared.device_names(), incomplete)


def models(incomplete: str) -> list[str]:
    """Return the names of models that begin as typed."""
    return _beginning(declared.model_names(), incomplete)


def recipes_and_models(incomplete: str) -> list[str]:
    """Return the names of recipes of sweeps and of models that begin as typed."""
    from actbench.run.recipes import Recipe

    return _beginning([*Recipe.files.names(), *declared.model_names()], incomplete)


def optimizers(incomplete: str) -> list[str]:
    """Return the names of optimizers that begin as typed."""
    return _beginning(get_args(Optimizer), incomplete)


def _beginning(names: Sequence[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
