"""Replacing the activation layers of a model, and saying which there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

from actbench.codecs.tables import Table
from actbench.errors import ConversionError
from actbench.nn.census import census
from actbench.nn.functions import TORCH, TRANSFORMERS, called, why_not
from actbench.nn.inverted import InvertedActivation
from actbench.nn.stepwise import Steps, StepwiseActivation
from actbench.nn.swap import swap
from actbench.results.records import Site, Unreached

Stepping = Callable[[nn.Module], tuple[Table | Steps, str] | None]
"""Gives the steps of a layer and what it then is, such as ``3-bit GELU``; None for a layer that stays."""


def swap_activations(model: nn.Module, steps_of: Stepping) -> tuple[nn.Module, tuple[Site, ...], tuple[Unreached, ...]]:
    """Replace every layer that is given steps by one that keeps these.

    Returns:
        The model, what was changed, and what looks like an activation and was left alone for a reason.
    """
    like = next(model.parameters(), None)
    sites: list[Site] = []
    unreached: list[Unreached] = []

    def rule(layer: nn.Module, path: str) -> nn.Module | None:
        found = steps_of(layer)
        if found is None:
            unreached.extend(left_alone(layer, path))
            return None
        steps, becomes = found
        sites.append(Site(path=path, was=called(layer), becomes=becomes))
        return StepwiseActivation(layer, steps, becomes.partition("-bit ")[2], like)

    return swap(model, rule), tuple(sites), tuple(unreached)


def refuse_converted(spec: str, model: nn.Module) -> None:
    """Raise a ConversionError if a model holds converted activations."""
    for path, module in model.named_modules():
        if isinstance(module, StepwiseActivation | InvertedActivation):
            raise ConversionError(
                f"{spec}: {path!r} is a {module} already; convert the original model, with one scheme for activations"
            )


def instead(model: nn.Module) -> str:
    """Say what activation layers a model holds."""
    found = Counter(called(module) for module in model.modules() if type(module).__module__ in (TORCH, TRANSFORMERS))
    held = ", ".join(f"{count} {name}" for name, count in found.most_common())
    return f"{type(model).__name__} holds {held or f'no activation modules, only {census(model)}'}"


def left_alone(layer: nn.Module, path: str) -> list[Unreached]:
    """Return, as a list of one, the layer and why it is left alone where it looks like an activation; or nothing."""
    reason = why_not(layer)
    return [] if reason is None else [Unreached(path=path, kind=type(layer).__name__, reason=reason)]
