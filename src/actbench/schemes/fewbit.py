from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from torch import nn

from actbench.codecs.activation import ACTIVATIONS, Activation
from actbench.codecs.tables import Weight, table
from actbench.errors import ConversionError
from actbench.nn.census import census
from actbench.nn.stepwise import StepwiseActivation
from actbench.nn.swap import swap
from actbench.records import Published, Site, Unreached
from actbench.schemes.base import Scheme
from actbench.training import TrainingSetup
from actbench.units import GIB

_SETTING = "fewbit:3 for GELU, RoBERTa-base, MRPC, batch 128, GPU not named"
_SOURCE = "README of github.com/skolai/fewbit"

_GUISES = {"gelu": ("gelu", "gelu_tanh", "quick_gelu")}
"""Names that stand for several functions."""

_TORCH = "torch.nn.modules.activation"
_TRANSFORMERS = "transformers.activations"
_FUNCTIONS = {
    f"{_TRANSFORMERS}.GELUActivation": "gelu",
    f"{_TRANSFORMERS}.GELUTanh": "gelu_tanh",
    f"{_TRANSFORMERS}.PytorchGELUTanh": "gelu_tanh",
    f"{_TRANSFORMERS}.NewGELUActivation": "gelu_tanh",
    f"{_TRANSFORMERS}.FastGELUActivation": "gelu_tanh",
    f"{_TRANSFORMERS}.AccurateGELUActivation": "gelu_tanh",
    f"{_TRANSFORMERS}.QuickGELUActivation": "quick_gelu",
}
"""The function of a module by its exact type, named so that transformers need not be imported."""


def _whole_number(value: Any) -> Any:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if type(value) is not int or not 1 <= value <= 8:
        raise ValueError("must be a whole number from 1 to 8")
    return value


class FewBit(Scheme):
    """Activations keep a few bits per element: which step of a piecewise-constant derivative it is on.

    Paper: Novikov et al., "Few-Bit Backward: Quantized Gradients of Activation Functions for Memory Footprint
    Reduction", arXiv 2202.00441.
    Kept for backward: ``ceil(elements * bits / 8)`` bytes, and ``2**bits`` levels per layer. The forward pass is exact;
    the gradient is multiplied with the level in place of the derivative.
    Not reproduced: the functions other than GELU, and the authors' CUDA kernels, which store one bit more than named.

    Attributes:
        bits: Bits per element, 1 to 8.
        functions: Which functions to convert; all that are known when empty. ``gelu`` stands for every form of it.
        weight: How much an error of the derivative at x counts: ``uniform``, or ``normal`` for normal inputs.
        scale: Standard deviation of the inputs that ``normal`` expects.
    """

    name: ClassVar[str] = "fewbit"
    summary: ClassVar[str] = "activations keep a few bits per element; their derivative becomes piecewise constant"
    paper: ClassVar[str] = "Novikov et al. 2022, arXiv 2202.00441"
    positional: ClassVar[str | None] = "bits"
    rank: ClassVar[int] = 10
    published: ClassVar[tuple[Published, ...]] = (
        Published(quantity="peak_saving", value=0.138, setting=_SETTING, source=_SOURCE),
        Published(quantity="peak_bytes", value=9.75 * GIB, setting=_SETTING, source=_SOURCE),
    )

    bits: Annotated[int, BeforeValidator(_whole_number)] = 3
    functions: tuple[str, ...] = ()
    weight: Weight = "uniform"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @field_validator("functions")
    @classmethod
    def _known(cls, functions: tuple[str, ...]) -> tuple[str, ...]:
        for function in functions:
            if function not in ACTIVATIONS:
                raise ValueError(f"{function!r} is not one of {', '.join(ACTIVATIONS)}")
        return functions

    @field_validator("scale")
    @classmethod
    def _of_normal(cls, scale: float, info: ValidationInfo) -> float:
        if info.data.get("weight") == "uniform":
            raise ValueError("a uniform weight has no scale; add weight=normal")
        return scale

    @property
    def claimed_bits(self) -> float:
        """Bits kept per element."""
        return self.bits

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace every activation module of a known function.

        Raises:
            ConversionError: There is none, or the model has been converted before.
        """
        for path, module in setup.module.named_modules():
            if isinstance(module, StepwiseActivation):
                raise ConversionError(f"{self.spec}: {path!r} is a {module} already; convert the original model")
        like = next(setup.module.parameters(), None)
        wanted = {guise for name in self.functions or ACTIVATIONS for guise in _GUISES.get(name, (name,))}
        sites: list[Site] = []
        unreached: list[Unreached] = []

        def rule(module: nn.Module, path: str) -> nn.Module | None:
            function = _function_of(module)
            reason = _why_not(module, function)
            if reason is not None:
                unreached.append(Unreached(path=path, kind=type(module).__name__, reason=reason))
            if function is None or function.name not in wanted or reason is not None:
                return None
            sites.append(Site(path=path, was=_called(module), becomes=f"{self.bits}-bit {function.label}"))
            best = table(function.name, self.bits, self.weight, self.scale)
            return StepwiseActivation(module, best, function.label, like)

        model = swap(setup.module, rule)
        if not sites:
            raise ConversionError(f"{self.spec}: none of {', '.join(sorted(wanted))} to convert; {_instead(model)}")
        return setup.changed(model, tuple(sites), tuple(unreached))


def _function_of(module: nn.Module) -> Activation | None:
    if type(module) is nn.GELU:
        return ACTIVATIONS["gelu_tanh" if module.approximate == "tanh" else "gelu"]
    name = _FUNCTIONS.get(f"{type(module).__module__}.{type(module).__qualname__}")
    return None if name is None else ACTIVATIONS[name]


def _why_not(module: nn.Module, function: Activation | None) -> str | None:
    """Return why an activation that looks like one of ours is left alone, or None."""
    name = type(module).__name__
    if function is not None:
        return "another forward is bound on this module" if "forward" in vars(module) else None
    if name == "ClippedGELUActivation":
        return "its derivative depends on where it clips, and has no table"
    if isinstance(module, nn.GELU):
        return "a subclass of nn.GELU, whose forward may be another"
    if "gelu" in name.lower() and not any(module.children()):
        return "not a GELU that is known by its type"
    return None


def _called(module: nn.Module) -> str:
    name = type(module).__name__
    return f"nn.{name}" if type(module).__module__ == _TORCH else name


def _instead(model: nn.Module) -> str:
    """Say what activation modules a model holds."""
    found = Counter(_called(module) for module in model.modules() if type(module).__module__ in (_TORCH, _TRANSFORMERS))
    held = ", ".join(f"{count} {name}" for name, count in found.most_common())
    return f"{type(model).__name__} holds {held or f'no activation modules, only {census(model)}'}"
