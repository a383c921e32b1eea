"""The activation layers of a model: the function that each computes, and their replacement."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from actbench.errors import ConversionError, UsageError
from actbench.methods.fewbit import computed, piecewise
from actbench.methods.fewbit.activation import ACTIVATIONS, Activation, activation
from actbench.methods.fewbit.called import CalledForward, StandIn, reach_calls, refuse_compiled_calls
from actbench.methods.fewbit.called.code import functions_called
from actbench.methods.fewbit.called.functions import FUNCTIONS
from actbench.methods.fewbit.computed import Numbers
from actbench.methods.fewbit.gated import GATES
from actbench.methods.fewbit.inverted import InvertedActivation
from actbench.methods.fewbit.piecewise import Piecewise
from actbench.methods.fewbit.stepwise import Steps, StepwiseActivation
from actbench.methods.fewbit.tables import Table
from actbench.model.records import Site, Unreached
from actbench.packing.replacement import census, reasons, swap

Function = Activation | Piecewise

TORCH = "torch.nn.modules.activation"
TRANSFORMERS = "transformers.activations"
_OURS = ("torch.", "actbench.")
"""Modules of Python whose layers are known by their classes."""

_PLAIN: dict[type[Any], str] = {
    nn.Hardswish: "hardswish",
    nn.LogSigmoid: "logsigmoid",
    nn.Mish: "mish",
    nn.SELU: "selu",
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "silu",
    nn.Softsign: "softsign",
    nn.Tanh: "tanh",
    nn.Tanhshrink: "tanhshrink",
}
_OF: dict[type[Any], Callable[[Any], Function]] = {
    nn.GELU: lambda layer: activation("gelu_tanh" if layer.approximate == "tanh" else "gelu"),
    nn.ELU: lambda layer: activation("elu", alpha=layer.alpha),
    nn.CELU: lambda layer: activation("celu", alpha=layer.alpha),
    nn.Softplus: lambda layer: activation("softplus", beta=layer.beta, threshold=layer.threshold),
    nn.ReLU: lambda layer: piecewise.relu(),
    nn.LeakyReLU: lambda layer: piecewise.leaky_relu(layer.negative_slope),
    nn.Threshold: lambda layer: piecewise.threshold(layer.threshold),
    nn.ReLU6: lambda layer: piecewise.hardtanh(0.0, 6.0, "relu6", "ReLU6"),
    nn.Hardtanh: lambda layer: piecewise.hardtanh(layer.min_val, layer.max_val),
    nn.Hardsigmoid: lambda layer: piecewise.hardsigmoid(),
    nn.Hardshrink: lambda layer: piecewise.hardshrink(layer.lambd),
    nn.Softshrink: lambda layer: piecewise.softshrink(layer.lambd),
}
_BY_NAME = {
    f"{TRANSFORMERS}.GELUActivation": "gelu",
    f"{TRANSFORMERS}.GELUTanh": "gelu_tanh",
    f"{TRANSFORMERS}.PytorchGELUTanh": "gelu_tanh",
    f"{TRANSFORMERS}.NewGELUActivation": "gelu_tanh",
    f"{TRANSFORMERS}.FastGELUActivation": "gelu_tanh",
    f"{TRANSFORMERS}.AccurateGELUActivation": "gelu_tanh",
    f"{TRANSFORMERS}.QuickGELUActivation": "quick_gelu",
    f"{TRANSFORMERS}.SiLUActivation": "silu",
    f"{TRANSFORMERS}.MishActivation": "mish",
}
"""Types by name, so that transformers need not be imported."""

_NO_TABLE = {
    f"{TRANSFORMERS}.ClippedGELUActivation": "its derivative depends on where it clips, and has no table",
    f"{TRANSFORMERS}.ReLUSquaredActivation": "its derivative grows without bound, and has no table",
    f"{TRANSFORMERS}.LaplaceActivation": "has no table",
    f"{TRANSFORMERS}.SqrtSoftplusActivation": "has no table",
    f"{TRANSFORMERS}.XIELUActivation": "learns parameters, whose gradient needs the input",
    f"{TORCH}.PReLU": "learns its slope, whose gradient needs the input",
    f"{TORCH}.RReLU": "draws its slopes at random",
    f"{TORCH}.GLU": "multiplies halves of its input, which is no elementwise function",
}

GUISES = {"gelu": ("gelu", "gelu_tanh", "quick_gelu")}
"""Names that stand for several functions."""

NAMES = (*ACTIVATIONS, *piecewise.PIECEWISE)
"""Every function that actbench knows as an activation."""


def function_of(layer: nn.Module) -> Function | None:
    """Return the function that a layer computes, with the layer's parameters, or None.

    For a class of neither torch nor transformers, the code is run on numbers to find the function. If the code is one
    call of the function, the result is None: the call is intercepted like any other.

    Raises:
        UsageError: With the layer's parameters the derivative cannot be tabulated.
    """
    kind: type[Any] = type(layer)
    if kind in _OF:
        return _OF[kind](layer)
    name = _PLAIN.get(kind) or _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    return ACTIVATIONS[name] if name else _computed(layer)


def _computed(layer: nn.Module) -> Function | None:
    """Return the function that a layer of another class computes, by a formula and not by one call of it."""
    if type(layer).__module__.startswith(_OURS):
        return None
    found = computed.numbers_of(layer)
    # what replaces a layer believes its attribute inplace
    if found is None or found.inplace is not bool(getattr(layer, "inplace", False)):
        return None
    bases: list[type[Any]] = [base for base in type(layer).__mro__ if base in _OF or base in _PLAIN]
    by_base = [(base, computed.numbers_of(layer, base)) for base in bases[:1]]  # None if it lacks the base's attributes
    own = [(_known_function(base, layer), expected) for base, expected in by_base if expected is not None]
    for function, expected in (*own, *_known()):
        if expected is not None and found.equals(expected, _where_told(function)):
            return None if _is_call(layer, function, found) else function
    return None


def _where_told(function: Function) -> Any:
    """Return at which points a function is told from others; where it has a table, not where its derivative jumps."""
    if isinstance(function, Piecewise):
        return ...
    return np.isfinite(computed.points()) & ~np.isin(computed.points(), function.kinks)


def _is_call(layer: nn.Module, function: Function, found: Numbers) -> bool:
    """Return whether the code of a layer only calls a function, so that the call can be intercepted."""
    if len(found.calls) != 1:
        return False
    ((called, settings),) = found.calls
    exact = None if settings is None else FUNCTIONS[called].layer(settings)
    return exact is not None and function_of(exact) == function and called in functions_called(layer)


def _known_function(kind: type[Any], layer: nn.Module) -> Function:
    return _OF[kind](layer) if kind in _OF else ACTIVATIONS[_PLAIN[kind]]


@functools.cache
def _known() -> tuple[tuple[Function, Numbers | None], ...]:
    """Return the functions with torch's default arguments, and what they give."""
    kinds = [kind for kind in (*_OF, *_PLAIN) if kind is not nn.Threshold]  # which has no defaults
    layers = [*(kind() for kind in kinds), nn.GELU("tanh")]
    found = [(_known_function(type(layer), layer), computed.numbers_of(layer)) for layer in layers]
    quick = ACTIVATIONS["quick_gelu"]
    return *found, (quick, computed.numbers(lambda x: x * GATES[quick.name](x)))


def why_not(layer: nn.Module) -> str | None:
    """Return why a layer that looks like an activation stays as it is, or None."""
    kind: type[Any] = type(layer)
    try:
        function = function_of(layer)
    except UsageError as error:
        return str(error)
    if function is not None:
        return "another forward is bound on this module" if "forward" in vars(layer) else None
    return _NO_TABLE.get(f"{kind.__module__}.{kind.__qualname__}")


def called(layer: nn.Module) -> str:
    """Return the name of a layer for a reader: ``nn.GELU``, ``GELUTanh``."""
    name = type(layer).__name__
    return f"nn.{name}" if type(layer).__module__ == TORCH else name


Stepping = Callable[[nn.Module], tuple[Table | Steps, str] | None]
"""Returns the steps of a layer and its new name, such as ``3-bit GELU``; None for a layer that stays."""


def stepwise(steps_of: Stepping, layer: nn.Module, like: Tensor | None) -> nn.Module | None:
    """Return the layer that saves steps in place of ``layer``, or None."""
    found = steps_of(layer)
    return None if found is None else StepwiseActivation(layer, found[0], found[1].partition("-bit ")[2], like)


class Replaced(NamedTuple):
    """The result of replacing the activations of a model.

    Attributes:
        model: The model.
        sites: Replaced layers, and modules whose calls of functions are intercepted.
        unreached: What looks like an activation but stays, with the reason.
    """

    model: nn.Module
    sites: tuple[Site, ...]
    unreached: tuple[Unreached, ...]

    @property
    def why_not(self) -> str:
        """The reasons why activations stay; empty if none does."""
        return reasons(self.unreached)


def replace_activations(model: nn.Module, stand_in: StandIn, kept: Mapping[nn.Module, str] | None = None) -> Replaced:
    """Replace every activation layer that ``stand_in`` has a layer for, and intercept the functions that modules call.

    Args:
        model: The model.
        stand_in: Returns the layer for a layer.
        kept: Layers that stay, with the scheme's reason.

    Raises:
        ConversionError: A module is compiled by itself, so that converting its activations would do nothing.
    """
    # code of the same class may compute something else than at the last conversion
    computed.forget()
    like, kept = next(model.parameters(), None), kept or {}
    sites: list[Site] = []
    unreached: list[Unreached] = []

    def rule(layer: nn.Module, path: str) -> nn.Module | None:
        new = stand_in(layer, like)
        reason = why_not(layer) if new is None else kept.get(layer)
        if reason is not None:
            unreached.append(Unreached(path=path, kind=type(layer).__name__, reason=reason))
        if new is None or reason is not None:
            return None
        sites.append(Site(path=path, was=called(layer), becomes=str(new.becomes)))
        return new

    refuse_compiled_calls(model, stand_in, is_activation)
    model = swap(model, rule)
    for host in reach_calls(model, stand_in, is_activation):
        becomes = ", ".join(dict.fromkeys(str(layer.becomes) for layer in host.layers))
        sites.append(Site(path=host.path, was=f"call of {', '.join(host.names)}", becomes=becomes, called=True))
    return Replaced(model, tuple(sites), tuple(unreached))


def is_activation(layer: nn.Module) -> bool:
    """Return whether a layer looks like an activation."""
    reason = why_not(layer)
    return reason is not None or function_of(layer) is not None


def refuse_converted(spec: str, model: nn.Module) -> None:
    """Raise a ConversionError if a model holds converted activations."""
    for path, module in model.named_modules():
        if isinstance(module, StepwiseActivation | InvertedActivation):
            found = f"is a {module}"
        elif CalledForward.of(module) is not None:
            found = f"has the activations that {type(module).__name__} calls converted"
        else:
            continue
        raise ConversionError(
            f"{spec}: {path!r} {found} already; convert the original model, with one scheme for activations"
        )


def instead(model: nn.Module) -> str:
    """Return a text about the activation layers of a model and the functions that its code calls."""
    modules = list(model.modules())
    layers = [each for each in modules if type(each).__module__ in (TORCH, TRANSFORMERS) or is_activation(each)]
    found = Counter(map(called, layers))
    held = ", ".join(f"{count} {name}" for name, count in found.most_common())
    others = (module for module in modules if module not in layers)
    calls = dict.fromkeys(FUNCTIONS[function].name for module in others for function in functions_called(module))
    calling = f", and its code calls {', '.join(calls)}" if calls else ""
    return f"{type(model).__name__} holds {held or f'no activation modules, only {census(model)}'}{calling}"
