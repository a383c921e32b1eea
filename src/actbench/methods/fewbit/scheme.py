from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator
from torch import nn

from actbench.errors import NothingToConvertError
from actbench.methods.fewbit import useractivation
from actbench.methods.fewbit.activation import Activation
from actbench.methods.fewbit.activations import (
    GUISES,
    NAMES,
    Function,
    function_of,
    instead,
    refuse_converted,
    replace_activations,
    stepwise,
    why_not,
)
from actbench.methods.fewbit.params import Bits
from actbench.methods.fewbit.stepwise import Steps
from actbench.methods.fewbit.tables import Table, Weight, table
from actbench.methods.fewbit.useractivation import OwnFunction
from actbench.model.declared.schemes import Shorthand
from actbench.model.provenance import Published
from actbench.scheme.base import ACTIVATIONS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, Packs, RunsFiles
from actbench.scheme.setup import Part, TrainingSetup
from actbench.units import GIB

_SETTING = "fewbit:3 for GELU, RoBERTa-base, MRPC, batch 128, GPU not named"
_SOURCE = "README of github.com/skolai/fewbit"

_PATH = re.compile(r".*\.py:[A-Za-z_]\w*")
_FUNCTIONS = {"type": "array", "items": {"type": "string", "enum": [*NAMES, "file.py:name"]}}


class FewBit(Scheme):
    """Activations save a few bits per element: the step of a piecewise-constant derivative that it is on.

    Paper: Novikov et al., "Few-Bit Backward: Quantized Gradients of Activation Functions for Memory Footprint
    Reduction", arXiv 2202.00441.
    Kept for backward: ``ceil(elements * bits / 8)`` bytes, and ``2**bits`` levels per layer. The forward pass is exact;
    the gradient is multiplied by the level in place of the derivative. The functions whose derivative has only two
    values (relu, leaky_relu, threshold, relu6, hardtanh, hardsigmoid, hardshrink, softshrink) save one bit whatever
    ``bits`` says, and their gradient is exact; ReLU has no levels.
    Layers, and functions that the model's code calls, are converted in the same way.
    Not reproduced: the authors' CUDA kernels, which store one bit more than named.

    Attributes:
        bits: Bits per element, 1 to 8.
        functions: Which functions to convert; empty for all known ones. ``gelu`` stands for every form of GELU, and
            ``file.py:name`` for one of your own: a class of layers, or a function of a tensor and the layers that
            compute it. The file is run.
        weight: How much an error of the derivative at x counts: ``uniform``, or ``normal`` for normal inputs.
        scale: Standard deviation of the inputs that ``normal`` expects.
    """

    name: ClassVar[str] = "fewbit"
    positional: ClassVar[str | None] = "bits"
    card: ClassVar[Card] = Card(
        summary="activations save a few bits per element; their derivative becomes piecewise constant",
        paper="Novikov et al. 2022, arXiv 2202.00441",
        published=(
            Published(quantity="peak_saving", value=0.138, setting=_SETTING, source=_SOURCE),
            Published(quantity="peak_bytes", value=9.75 * GIB, setting=_SETTING, source=_SOURCE),
        ),
        variants=(":4", ":2"),  # four bits are nearly exact
        leading=(":4",),
        compiles=True,
        shorthands=(
            Shorthand(
                "--gelu-bits",
                "fewbit:{},functions=gelu",
                "BITS",
                "Short for the scheme fewbit:BITS,functions=gelu (1 to 8).",
            ),
            Shorthand(
                "--activation-bits", "fewbit:{}", "BITS", "Short for the scheme fewbit:BITS, for all activations."
            ),
        ),
    )
    claims: ClassVar[tuple[str, ...]] = (ACTIVATIONS,)

    bits: Bits = 3
    functions: Annotated[tuple[str, ...], WithJsonSchema(_FUNCTIONS)] = ()
    weight: Weight = "uniform"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @field_validator("functions")
    @classmethod
    def _known(cls, functions: tuple[str, ...]) -> tuple[str, ...]:
        joined = tuple(_joined(functions))
        for function in joined:
            if _PATH.fullmatch(function):
                useractivation.check(function)
            elif function not in NAMES:
                close = difflib.get_close_matches(function, NAMES, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"{function!r} is not one of {', '.join(NAMES)} or file.py:name{hint}")
        return joined

    @field_validator("scale")
    @classmethod
    def _of_normal(cls, scale: float, info: ValidationInfo) -> float:
        if info.data.get("weight") == "uniform":
            raise ValueError("a uniform weight has no scale; add weight=normal")
        return scale

    @property
    def facets(self) -> Iterable[Facet]:
        """Bits saved per element, and the user's files that hold functions."""
        return Packs(self.bits), RunsFiles(self._files)

    @property
    def _files(self) -> tuple[str, ...]:
        return tuple(function for function in self.functions if _PATH.fullmatch(function))

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace the activation layers of all wanted functions, and the calls of these in modules' code.

        Raises:
            ConversionError: No such activation is found, or the model is converted already.
            UsageError: A user's function fails, or its derivative cannot be tabulated.
        """
        refuse_converted(self.spec, setup.module)
        wanted = self._wanted
        steps_of = partial(self._steps_of, wanted, [OwnFunction.load(spec) for spec in self._files])
        found = replace_activations(setup.module, partial(stepwise, steps_of))
        if not found.sites:
            asked = ", ".join([*sorted(wanted), *self._files])
            raise NothingToConvertError(f"{self.spec}: none of {asked} to convert; {instead(found.model)}")
        return setup.changed(found.model, found.sites, found.unreached, by=Part(self.spec))

    @property
    def _wanted(self) -> frozenset[str]:
        """Names of the functions to convert, without the user's own."""
        named = [name for name in self.functions if name not in self._files]
        known = named or ([] if self.functions else NAMES)
        return frozenset(guise for name in known for guise in GUISES.get(name, (name,)))

    def _steps_of(
        self, wanted: frozenset[str], owned: list[OwnFunction], layer: nn.Module
    ) -> tuple[Table | Steps, str] | None:
        mine = (function for function in (one.of(layer) for one in owned) if function is not None)
        function: Function | None = next(mine, None) or (function_of(layer) if why_not(layer) is None else None)
        if function is None or (function.name not in wanted and function.name not in self._files):
            return None
        if isinstance(function, Activation):
            return table(function, self.bits, self.weight, self.scale), f"{self.bits}-bit {function.label}"
        return function, f"1-bit {function.label}"


def _joined(parts: Iterable[str]) -> Iterable[str]:
    """Join paths again that the grammar, in which ``/`` separates the items of a list, has split into items."""
    path: list[str] = []
    for part in parts:
        if not path and part in NAMES:
            yield part
            continue
        path.append(part)
        if _PATH.fullmatch(part):
            whole = "/".join(path)  # a first folder of a function's name would be taken for the function
            yield f"./{whole}" if whole.partition("/")[0] in NAMES else whole
            path = []
    yield from path
