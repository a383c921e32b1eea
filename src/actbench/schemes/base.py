"""What a scheme is, what it declares of itself, and how it is limited to parts of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar, Final, Literal, Self

from pydantic import field_validator, model_validator
from torch import nn

from actbench.errors import ConversionError, NothingToConvertError
from actbench.nn.wrapped import bind_entries
from actbench.results.fits import Gradient
from actbench.results.measured import Diagnostic
from actbench.results.records import Data, Published
from actbench.schemes.only import compiled, parts_of, replace_part
from actbench.schemes.pasted import InTrainer
from actbench.setup import Batch, TrainingSetup
from actbench.spec import shortest

Change = Literal[
    "saved tensors",
    "recomputation",
    "optimizer",
    "gradients",
    "parameters",
    "loss",
    "precision",
    "batch",
    "placement over processes",
]
"""What a scheme may touch in a training step; the contract tests of a scheme are chosen by it."""

PLACEMENT: Final = "placement over processes"
OF_PARTS: Final[frozenset[Change]] = frozenset(("saved tensors", "recomputation", "parameters"))
"""What is changed module by module, and so in a part of a model alone."""

SAVED_TENSORS: Final = "pack or move saved tensors by hooks, of which only the innermost run"
SAVED_RESULTS: Final = "choose by the operator what waits for the backward pass"
BLOCKS: Final = "run blocks again in the backward pass"
OPTIMIZER_STATE: Final = "say how optimizer state is kept"
ACTIVATIONS: Final = "replace activation layers"
GRADIENTS: Final = "take each gradient off its parameter within the backward pass"
STEPS: Final = "say when the optimizer steps"
PRECISION: Final = "say in which type is computed"
DATA_PARALLEL: Final = "say how processes with batches of their own share the model"
TENSOR_PARALLEL: Final = "say how processes share the layers of one batch"


def refuse_untrained(who: str, module: nn.Module) -> None:
    """Raise a NothingToConvertError, told by ``who``, for a model of which nothing is trained."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise NothingToConvertError(f"{who}: {type(module).__name__} has no parameter to train; unfreeze one")


def refuse_spread(scheme: Scheme, who: str, instead: str) -> None:
    """Raise a ConversionError for a scheme that spreads a model over processes.

    Args:
        scheme: The scheme.
        who: Who cannot have it, as the beginning of a sentence.
        instead: What to do.
    """
    if scheme.mesh_axes:
        _, placing = scheme.placed()
        named = (placing or scheme).spec
        raise ConversionError(f"{who}, and {named} spreads it over {math.prod(scheme.mesh_axes.values())}: {instead}")


NOTHING_PACKED = (
    "none of what the model's modules save is worth packing: 'actbench measure MODEL --scheme SCHEME --ledger' lists "
    "why; take a larger batch, or a format of fewer bits"
)
"""What is said of hooks that run and pack nothing."""


class Scheme(Data):
    """A method from a paper, as a function from a training setup to a training setup.

    Class attributes that a scheme gives:
        name: How it is called in specifications.
        summary: One line for ``actbench schemes``.
        paper: Where the method comes from; empty for what has no paper.
        positional: The field that the value after the colon fills; None when it takes none.
        rank: Order in which composed schemes are applied (low first): 10 replaces modules, 20 hooks modules,
            30 recomputes blocks, 40 wraps the whole model. Order in the specification does not matter.
        published: Figures its authors published.

    Attributes:
        only: Paths of modules that the scheme is limited to, such as ``encoder.layer.[0-5]``; empty for the model.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    positional: ClassVar[str | None] = None
    rank: ClassVar[int] = 10
    published: ClassVar[tuple[Published, ...]] = ()

    only: tuple[str, ...] = ()

    @field_validator("only")
    @classmethod
    def _patterns(cls, only: tuple[str, ...]) -> tuple[str, ...]:
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
        """What of a training step the scheme touches."""
        return ("saved tensors",)

    @property
    def claims(self) -> tuple[str, ...]:
        """What no other scheme may do to the same modules, in words that go on from ``they both``."""
        return ()

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """How many processes train together along each axis of :attr:`TrainingSetup.mesh`; empty for one alone."""
        return {}

    @property
    def untraceable(self) -> str:
        """Why fake tensors do not show what the scheme does, which is not simulated then; empty where they do."""
        return ""

    @property
    def draws_alike(self) -> bool:
        """Whether dropout drops what it drops in the exact model; other batches are drawn for otherwise."""
        return "batch" not in self.changes

    @property
    def quickens(self) -> bool:
        """Whether it may make a step faster, since less is moved or multiplied: worth trying where all fits, too."""
        return False

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with the scheme applied to its model, or to the parts of it that ``only`` names.

        Modules are changed in place. A part is changed as a model of its own: bits are shared out within it.

        Raises:
            ConversionError: The model holds nothing the scheme works on, or ``only`` names no module.
        """
        setup = replace(setup, untraceable=setup.untraceable or self.untraceable)
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
            replace_part(setup.module, part, changed.module)
            setup = replace(changed, module=setup.module, path=setup.path)
        if nothing is not None and len(setup.sites) == before:
            raise nothing
        bind_entries(setup.module)  # those of the parts stand within those of the model
        return setup

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with the whole of its model changed, in place; what a scheme gives.

        Raises:
            NothingToConvertError: The model holds nothing the scheme works on.
            ConversionError: The scheme cannot work on the model.
        """
        raise NotImplementedError

    def parted(self) -> tuple[Scheme | None, Scheme | None]:
        """Return this up to what changes parameters, and what is applied after that; None for nothing.

        The gradient of the whole is compared with that of the first alone, or of the exact model where there is none.
        """
        return (self, None) if "parameters" in self.changes else (None, self)

    def placed(self) -> tuple[Scheme | None, Scheme | None]:
        """Return what changes the model of one process, and what spreads the result over processes; None for nothing.

        What a model saves is traced between the two: afterwards it runs with all its processes only.
        """
        return (None, self) if PLACEMENT in self.changes else (self, None)

    def diagnostics(self, setup: TrainingSetup, batch: Batch, seed: int) -> tuple[Diagnostic, ...]:
        """Return what else can be said of the gradients of a setup that this scheme was applied to.

        Args:
            setup: The result of :meth:`apply`, with a loss.
            batch: On the model's device; a few training steps' worth of forward and backward may be run on it.
            seed: Of what is random in them.

        Returns:
            Numbers, each with the name and title of its column; none by default.
        """
        return ()

    @property
    def adapts(self) -> bool:
        """Whether a step changes what later ones keep: its gradients are then judged after a first step."""
        return False

    @property
    def bits_by_gradients(self) -> bool:
        """Whether in how many bits something is packed follows from gradients that this process has seen."""
        return False

    def as_after_a_step(self, setup: TrainingSetup) -> AbstractContextManager[None]:
        """Return a context in which the setup's weights are what the scheme makes of them in each step of training.

        Args:
            setup: The result of :meth:`apply`; at the end of the context its weights are what they were.
        """
        return nullcontext()

    @classmethod
    def worth_trying(cls, batch_size: int) -> tuple[str, ...]:
        """Return the specifications that ``actbench fit`` tries, what costs least time first; none keeps it out of fit.

        Args:
            batch_size: Rows of the batch of a step.
        """
        return (cls.name,)

    @property
    def needs_bfloat16(self) -> bool:
        """Whether the device has to compute in bfloat16."""
        return False

    @property
    def scales_loss(self) -> bool:
        """Whether gradients vanish unless the loss is scaled."""
        return False

    @property
    def gradient(self) -> Gradient:
        """What the gradient is, against that of the step without the scheme.

        ``exact`` to rounding, ``unbiased`` (its mean over what is random is exact) or ``approximate``, which is what is
        said of a scheme that does not say otherwise and changes saved tensors, precision or what is computed.
        """
        loses = {"saved tensors", "precision"} & set(self.changes)
        return "approximate" if loses or self.lossy_forward else "exact"

    def gradient_of(self, warnings: Sequence[str]) -> Gradient:
        """Return what the gradient is of a model in which applying the scheme gave these warnings, :attr:`gradient`."""
        return self.gradient

    @property
    def keeps_updates(self) -> bool:
        """Whether the optimizer's updates are bit for bit those that it makes of the same gradients otherwise."""
        return "optimizer" not in self.changes

    def in_trainer(self, batch_size: int) -> InTrainer:
        """Return how the scheme is had in the Hugging Face Trainer.

        Args:
            batch_size: Rows of the batch of a step.
        """
        beyond = sorted(set(self.changes) - OF_PARTS - {"loss"})
        if beyond:
            return InTrainer(why_not=f"{self.spec} changes {' and '.join(beyond)}, which Trainer sees to itself")
        if "parameters" in self.changes:  # its optimizer is made before callbacks are called
            return InTrainer(convert=self.spec)
        return InTrainer(callback=self.spec)

    @property
    def claimed_bits(self) -> float | None:
        """Bits kept per element of what the scheme packs, or None where that is no fixed number."""
        return None

    @property
    def lossy_forward(self) -> bool:
        """Whether the forward pass is not bit for bit that of the exact model."""
        return False

    @property
    def runs_files(self) -> tuple[str, ...]:
        """The ``file.py:name`` of every file of the user's that applying the scheme runs."""
        return ()

    @property
    def spec(self) -> str:
        """The shortest specification that builds this scheme."""
        return shortest(self.name, self.positional, self)
