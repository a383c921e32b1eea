"""The interface of schemes: what a scheme declares, and how ``only=`` limits it to parts of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar, Final, Literal, Self

from pydantic import field_validator, model_validator
from torch import nn

from actbench.errors import ConversionError, NothingToConvertError
from actbench.nn.recomputed import refuse_hooks_inside
from actbench.nn.wrapped import bind_entries
from actbench.results.gradient import Gradient
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
    "memory format",
    "batch",
    "placement over processes",
]
"""What a scheme may change in a training step; it decides which contract tests run on the scheme."""

PLACEMENT: Final = "placement over processes"
OF_PARTS: Final[frozenset[Change]] = frozenset(("saved tensors", "recomputation", "parameters"))
"""Changes that are made module by module, so that ``only=`` can limit them to parts of a model."""

SAVED_TENSORS: Final = "pack or move saved tensors by hooks, of which only the innermost run"
SAVED_RESULTS: Final = "choose by the operator what waits for the backward pass"
BLOCKS: Final = "run blocks again in the backward pass"
OPTIMIZER_STATE: Final = "say how optimizer state is kept"
ACTIVATIONS: Final = "replace activation layers"
GRADIENTS: Final = "take each gradient off its parameter within the backward pass"
WAITING_GRADIENTS: Final = "say where gradients wait for the optimizer"
STEPS: Final = "say when the optimizer steps"
PRECISION: Final = "say in which type is computed"
DATA_PARALLEL: Final = "say how processes with batches of their own share the model"
TENSOR_PARALLEL: Final = "say how processes share the layers of one batch"


def refuse_untrained(who: str, module: nn.Module) -> None:
    """Raise a NothingToConvertError that begins with ``who`` if no parameter of the model is trained."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise NothingToConvertError(f"{who}: {type(module).__name__} has no parameter to train; unfreeze one")


def refuse_spread(scheme: Scheme, who: str, instead: str) -> None:
    """Raise a ConversionError for a scheme that spreads a model: ``who`` cannot have it, what to do ``instead``."""
    if scheme.mesh_axes:
        _, placing = scheme.placed()
        named = (placing or scheme).spec
        raise ConversionError(f"{who}, and {named} spreads it over {math.prod(scheme.mesh_axes.values())}: {instead}")


NOTHING_PACKED = (
    "none of what the model's modules save is worth packing: 'actbench measure MODEL --scheme SCHEME --ledger' lists "
    "why; take a larger batch, or a format of fewer bits"
)
"""The warning for hooks that run and pack nothing."""


class Scheme(Data):
    """A method from a paper, as a function from a training setup to a training setup.

    Class attributes of a scheme:
        name: Its name in specifications.
        summary: One line for ``actbench schemes``.
        paper: Source of the method; empty if there is none.
        positional: The field that the value after the colon fills; None when it takes none.
        rank: Order in which composed schemes are applied (low first): 10 replaces modules, 20 hooks modules,
            30 recomputes blocks, 40 wraps the whole model. Order in the specification does not matter.
        published: Figures that its authors published.
        variants: What follows the name in each specification that ``actbench fit`` tries, the fastest first.
        quickens: Whether it may make a step faster, so that it is worth trying even if everything fits.
        of_operators: Operators of torch that alone it may make faster; empty for any.
        libraries: Modules that whoever runs many cases may import once, and not in the process of each.

    Attributes:
        only: Paths of modules that the scheme is limited to, such as ``encoder.layer.[0-5]``; empty for the model.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    positional: ClassVar[str | None] = None
    rank: ClassVar[int] = 10
    published: ClassVar[tuple[Published, ...]] = ()
    variants: ClassVar[tuple[str, ...]] = ("",)
    quickens: ClassVar[bool] = False
    of_operators: ClassVar[tuple[str, ...]] = ()
    libraries: ClassVar[tuple[str, ...]] = ()

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
        """What the scheme changes in a training step."""
        return ("saved tensors",)

    @property
    def period(self) -> int | None:
        """Of how many equal blocks in a row it changes each in its own way; None if it names modules of one model."""
        return None if self.only else 1

    @property
    def claims(self) -> tuple[str, ...]:
        """What no other scheme may do to the same modules, as words that follow ``both`` in a message."""
        return ()

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """How many processes train together along each axis of :attr:`TrainingSetup.mesh`; empty for one alone."""
        return {}

    @property
    def untraceable(self) -> str:
        """Why fake tensors do not show what the scheme does, so that it is not simulated; empty if they do."""
        return ""

    @property
    def unsharded(self) -> str:
        """What of the scheme FSDP2 does not go with, and why, as words that follow ``does not go with``; or empty."""
        return ""

    @property
    def draws_alike(self) -> bool:
        """Whether dropout draws the masks of the exact model; else gradients are compared without dropout."""
        return "batch" not in self.changes

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with the scheme applied to its model, or to the parts of it that ``only`` names.

        Modules are changed in place. A part is changed like a whole model: bits are allocated within it.

        Raises:
            ConversionError: The model holds nothing the scheme works on, ``only`` names no module, or hooks that pack
                saved tensors are now inside of a block that is recomputed.
        """
        setup = replace(setup, untraceable=setup.untraceable or self.untraceable)
        setup = replace(setup, unsharded=setup.unsharded or self.unsharded)
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

    def parted(self) -> tuple[Scheme | None, Scheme | None]:
        """Return the scheme up to its last change of parameters, and the rest after it; None for an empty half.

        The gradient of the scheme is compared with that of the first half, or of the exact model without one.
        """
        return (self, None) if "parameters" in self.changes else (None, self)

    def placed(self) -> tuple[Scheme | None, Scheme | None]:
        """Return what changes the model of one process, and what spreads the result over processes; None for nothing.

        What a model saves is traced between the two: afterwards it runs with all its processes only.
        """
        return (None, self) if PLACEMENT in self.changes else (self, None)

    def diagnostics(self, setup: TrainingSetup, batch: Batch, seed: int) -> tuple[Diagnostic, ...]:
        """Return further numbers about the gradients of a setup that this scheme was applied to.

        Args:
            setup: The result of :meth:`apply`, with a loss.
            batch: On the model's device; a few forward and backward passes may run on it.
            seed: Seed of the random numbers in these passes.

        Returns:
            Numbers, each with the name and title of its column; none by default.
        """
        return ()

    @property
    def adapts(self) -> bool:
        """Whether a step changes what later steps save; gradients are then judged after a first step."""
        return False

    @property
    def bits_by_gradients(self) -> bool:
        """Whether in how many bits something is packed follows from gradients that this process has seen."""
        return False

    def as_after_a_step(self, setup: TrainingSetup) -> AbstractContextManager[None]:
        """Return a context in which the weights of a changed setup are as after a step; it restores them."""
        return nullcontext()

    @classmethod
    def worth_trying(cls, batch_size: int) -> tuple[str, ...]:
        """Return what ``actbench fit`` tries for so many rows, the fastest first; it skips a scheme without any."""
        return tuple(f"{cls.name}{variant}" for variant in cls.variants)

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
        """How the gradient differs from that of the step without the scheme.

        ``exact`` to rounding, ``unbiased`` (its mean over the random numbers is exact) or ``approximate``, the default
        of schemes that change saved tensors, the precision or the forward pass.
        """
        loses = {"saved tensors", "precision"} & set(self.changes)
        return "approximate" if loses or self.lossy_forward else "exact"

    def gradient_of(self, warnings: Sequence[str]) -> Gradient:
        """Return :attr:`gradient` for a model on which the scheme gave these warnings."""
        return self.gradient

    @property
    def keeps_updates(self) -> bool:
        """Whether the same gradients give bit for bit the same updates as without the scheme."""
        return "optimizer" not in self.changes

    def in_trainer(self, batch_size: int) -> InTrainer:
        """Return how to use the scheme in the Hugging Face Trainer, with batches of so many rows."""
        beyond = sorted(set(self.changes) - OF_PARTS - {"loss"})
        if beyond:
            return InTrainer(why_not=f"{self.spec} changes {' and '.join(beyond)}, which Trainer sees to itself")
        if "parameters" in self.changes:  # Trainer makes its optimizer before it calls callbacks
            return InTrainer(convert=self.spec)
        return InTrainer(callback=self.spec)

    @property
    def claimed_bits(self) -> float | None:
        """Bits per element that the scheme packs, or None if the number is not fixed."""
        return None

    @property
    def lossy_forward(self) -> bool:
        """Whether the forward pass differs in any bit from that of the exact model."""
        return False

    @property
    def runs_files(self) -> tuple[str, ...]:
        """The ``file.py:name`` of each user's file that runs when the scheme is applied."""
        return ()

    @property
    def spec(self) -> str:
        """The shortest specification that builds this scheme."""
        return shortest(self.name, self.positional, self)
