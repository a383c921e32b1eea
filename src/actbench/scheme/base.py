"""The interface of schemes: what a scheme declares, and how ``only=`` limits it to parts of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Final, Literal, Self, TypeVar

from pydantic import field_validator, model_validator
from torch import nn

from actbench.errors import NothingToConvertError
from actbench.model.data import Data
from actbench.model.gradient import Gradient
from actbench.model.spec import shortest
from actbench.packing.wrapped import bind_entries, refuse_hooks_inside
from actbench.scheme.card import Card
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Facet, LossyForward
from actbench.scheme.only import MOST_PATTERNS, compiled, parts_of, replace_part
from actbench.scheme.setup import TrainingSetup

Change = Literal[
    "saved tensors",
    "recomputation",
    "optimizer",
    "gradients",
    "parameters",
    "loss",
    "precision",
    "memory format",
    "batch",
    "placement over processes",
]
"""What a scheme may change in a training step; it decides which contract tests run on the scheme."""

Kind = TypeVar("Kind", bound=Facet)

PLACEMENT: Final = "placement over processes"
OF_PARTS: Final[frozenset[Change]] = frozenset(("saved tensors", "recomputation", "parameters"))
"""Changes that are made module by module, so that ``only=`` can limit them to parts of a model."""

SAVED_TENSORS: Final = "pack or move saved tensors by hooks, of which only the innermost run"
SAVED_RESULTS: Final = "choose by the operator what waits for the backward pass"
BLOCKS: Final = "run blocks again in the backward pass"
OPTIMIZER_STATE: Final = "say how optimizer state is kept"
ACTIVATIONS: Final = "replace activation layers"
LINEAR_LAYERS: Final = "replace linear layers by ones that save less"
GRADIENTS: Final = "take each gradient off its parameter within the backward pass"
WAITING_GRADIENTS: Final = "say where gradients wait for the optimizer"
STEPS: Final = "say when the optimizer steps"
STEPPED_TOGETHER: Final = "say which parameters are stepped together"
PRECISION: Final = "set the dtype of the computation"
DATA_PARALLEL: Final = "say how processes with batches of their own share the model"
TENSOR_PARALLEL: Final = "say how processes share the layers of one batch"


def refuse_untrained(who: str, module: nn.Module) -> None:
    """Raise a NothingToConvertError that begins with ``who`` if no parameter of the model is trained."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise NothingToConvertError(f"{who}: {type(module).__name__} has no parameter to train; unfreeze one")


NOTHING_PACKED = (
    "none of what the model's modules save is worth packing: 'actbench measure MODEL --scheme SCHEME --ledger' lists "
    "why; take a larger batch, or a format of fewer bits"
)
"""The warning for hooks that run and pack nothing."""


class Scheme(Data):
    """A method from a paper, as a function from a training setup to a training setup.

    A scheme gives ``name``, ``card``, its parameters as fields, and ``change``; where they differ from the defaults
    ``changes``, ``claims``, ``gradient`` and ``facets``. Its docstring says what it saves for the backward pass.

    Class attributes of a scheme:
        name: Its name in specifications.
        positional: The field that the value after the colon fills; None when it takes none.
        card: Its summary, paper and published figures, and what else is the same for all its values.

    Attributes:
        only: Paths of modules that the scheme is limited to, such as ``encoder.layer.[0-5]``; empty for the model.
    """

    name: ClassVar[str] = ""
    positional: ClassVar[str | None] = None
    card: ClassVar[Card]

    only: tuple[str, ...] = ()

    @field_validator("only")
    @classmethod
    def _patterns(cls, only: tuple[str, ...]) -> tuple[str, ...]:
        if len(only) > MOST_PATTERNS:
            raise ValueError(f"it has {len(only)} patterns and may have {MOST_PATTERNS}: name larger parts")
        for pattern in only:
            compiled(pattern)
        return only

    @model_validator(mode="after")
    def _of_parts(self) -> Self:
        others = set(self.changes) - OF_PARTS
        if self.only and (others or not self.changes):
            what = f"this scheme changes {' and '.join(sorted(others)) or 'nothing'}"
            raise ValueError(f"only= limits what modules save or train, and {what}; leave only= out")
        return self

    @property
    def changes(self) -> tuple[Change, ...]:
        """What the scheme changes in a training step."""
        return ("saved tensors",)

    @property
    def claims(self) -> tuple[str, ...]:
        """What no other scheme may do to the same modules, as words that follow ``both`` in a message."""
        return ()

    @property
    def gradient(self) -> Gradient:
        """How the gradient differs from that of the step without the scheme.

        ``exact`` to rounding, ``unbiased`` (its mean over the random numbers is exact) or ``approximate``, the default
        of schemes that change saved tensors, the precision or the forward pass.
        """
        is_lossy = not {"saved tensors", "precision"}.isdisjoint(self.changes) or self.facet(LossyForward) is not None
        return "approximate" if is_lossy else "exact"

    @property
    def facets(self) -> Iterable[Facet]:
        """What the scheme has and others have not; see :mod:`actbench.scheme.facets`."""
        return ()

    def facet(self, kind: type[Kind]) -> Kind | None:
        """Return the facet of a type, or None."""
        return next((each for each in self.facets if isinstance(each, kind)), None)

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with the scheme applied to its model, or to the parts of it that ``only`` names.

        Modules are changed in place. A part is changed like a whole model: bits are allocated within it.

        Raises:
            ConversionError: The model holds nothing the scheme works on, ``only`` names no module, or hooks that pack
                saved tensors are now inside of a block that is recomputed.
        """
        if limits := self.facet(Limits):
            setup = replace(setup, limits=Limits.together((setup.limits, limits)))
        if not self.only:
            return self.change(setup)
        nothing: NothingToConvertError | None = None
        before = len(setup.sites)
        for path, part in parts_of(setup.module, self.only):
            try:
                changed = self.change(replace(setup, module=part, path=path))
            except NothingToConvertError as error:
                nothing = error
                continue
            if changed.module is not part:  # else it was changed in place, and no walk through the model is needed
                replace_part(setup.module, part, changed.module)
            setup = replace(changed, module=setup.module, path=setup.path)
        if nothing is not None and len(setup.sites) == before:
            raise nothing
        bind_entries(setup.module)  # entries of the parts go inside those of the model
        refuse_hooks_inside(setup.module)
        return setup

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with its whole model changed, in place; each scheme defines this.

        Raises:
            NothingToConvertError: The model holds nothing the scheme works on.
            ConversionError: The scheme cannot work on the model.
        """
        raise NotImplementedError

    @property
    def spec(self) -> str:
        """The shortest specification that builds this scheme."""
        return shortest(self.name, self.positional, self)
