"""Activation functions by their derivatives, in float64: what the tables of few-bit codecs approximate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from actbench.codecs import derivatives as d
from actbench.codecs.derivatives import Array
from actbench.errors import UsageError

Parameters = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Activation:
    """A scalar function, as far as a table of its derivative needs to know it.

    Attributes:
        name: Its name in specifications.
        label: Its name for a reader.
        derivative: The derivative, elementwise on float64 arrays.
        even: Whether the derivative is even; then ``|x|`` is encoded and all codes serve one half line.
        kinks: Where the derivative jumps or bends.
        parameters: Names and values of torch's parameters of it.
        lasting: Whether name and parameters say all of it, so that its tables may be kept on disk.
    """

    name: str
    label: str
    derivative: Callable[[Array], Array]
    even: bool = False
    kinks: tuple[float, ...] = ()
    parameters: Parameters = ()
    lasting: bool = True

    @property
    def key(self) -> str:
        """The name, with the parameters that are not torch's defaults."""
        defaults = ACTIVATIONS[self.name].parameters if self.name in ACTIVATIONS else ()
        changed = [f"{name}={value!r}" for name, value in self.parameters if (name, value) not in defaults]
        return f"{self.name}({','.join(changed)})" if changed else self.name


def activation(name: str, **parameters: float) -> Activation:
    """Return a function of :data:`ACTIVATIONS`, with its parameters where they are not torch's defaults.

    Args:
        name: Its name.
        parameters: ``alpha`` of elu and celu; ``beta`` and ``threshold`` of softplus.

    Raises:
        UsageError: There is no such function or parameter, or no derivative to tabulate with such a value.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"there is no table for a function {name!r}; known: {', '.join(ACTIVATIONS)}")
    known = dict(ACTIVATIONS[name].parameters)
    for key, value in parameters.items():
        if key not in known:
            raise UsageError(f"{name} has no parameter {key!r}; it has {', '.join(known) or 'none'}")
        usable = value == 0 or _SMALLEST <= abs(value) <= _LARGEST
        if not usable or ((name, key) in _POSITIVE and value <= 0):
            raise UsageError(f"{name} with {key}={value:g} has no derivative that a table could stand for")
    values = known | {key: float(value) for key, value in parameters.items()}
    return _with(name, tuple(values.items()))


@functools.cache
def _with(name: str, parameters: Parameters) -> Activation:
    base, values = ACTIVATIONS[name], dict(parameters)
    if parameters == base.parameters:
        return base
    kinks = (values["threshold"] / values["beta"],) if name == "softplus" else base.kinks
    return replace(base, derivative=partial(_FAMILIES[name], **values), kinks=kinks, parameters=parameters)


_FAMILIES: dict[str, Callable[..., Array]] = {"elu": d.elu, "celu": d.celu, "softplus": d.softplus}
_SMALLEST, _LARGEST = 1e-30, 1e30  # of parameters
_POSITIVE = {("celu", "alpha"), ("softplus", "beta")}

ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("gelu", "GELU", d.gelu),
        Activation("gelu_tanh", "GELU (tanh)", d.gelu_tanh),
        Activation("quick_gelu", "QuickGELU", d.quick_gelu),
        Activation("silu", "SiLU", d.silu),
        Activation("mish", "Mish", d.mish),
        Activation("hardswish", "Hardswish", d.hardswish, kinks=(-3.0, 3.0)),
        Activation("elu", "ELU", d.elu, kinks=(0.0,), parameters=(("alpha", 1.0),)),
        Activation("celu", "CELU", d.celu, kinks=(0.0,), parameters=(("alpha", 1.0),)),
        Activation("selu", "SELU", d.selu, kinks=(0.0,)),
        Activation("softplus", "Softplus", d.softplus, kinks=(20.0,), parameters=(("beta", 1.0), ("threshold", 20.0))),
        Activation("logsigmoid", "LogSigmoid", d.logsigmoid),
        Activation("sigmoid", "Sigmoid", d.sigmoid, even=True),
        Activation("tanh", "Tanh", d.tanh, even=True),
        Activation("tanhshrink", "Tanhshrink", d.tanhshrink, even=True),
        Activation("softsign", "Softsign", d.softsign, even=True),
    )
}
"""The functions with a table, by name, with torch's default parameters."""
