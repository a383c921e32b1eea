"""What a scheme is, and what one of a composition alone may change."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Final

from actbench.results.records import Data, Published
from actbench.setup import Batch, TrainingSetup
from actbench.spec import shortest

SAVED_TENSORS: Final = "pack or move saved tensors by hooks, of which only the innermost run"
ACTIVATIONS: Final = "replace activation layers"


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
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    positional: ClassVar[str | None] = None
    rank: ClassVar[int] = 10
    published: ClassVar[tuple[Published, ...]] = ()

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with the scheme applied; modules are changed in place.

        Raises:
            ConversionError: The model holds nothing the scheme works on.
        """
        raise NotImplementedError

    def diagnostics(self, setup: TrainingSetup, batch: Batch, seed: int) -> Mapping[str, float]:
        """Return what else can be said of the gradients of a setup that this scheme was applied to.

        Args:
            setup: The result of :meth:`apply`, with a loss.
            batch: On the model's device; a few training steps' worth of forward and backward may be run on it.
            seed: Of what is random in them.

        Returns:
            Fields of :class:`~actbench.results.measured.Measurement` by name; none by default.
        """
        return {}

    @property
    def adapts(self) -> bool:
        """Whether a step changes what later ones keep: its gradients are then judged after a first step."""
        return False

    def as_after_a_step(self, setup: TrainingSetup) -> AbstractContextManager[None]:
        """Return a context in which the setup's weights are what the scheme makes of them in each step of training.

        Args:
            setup: The result of :meth:`apply`; at the end of the context its weights are what they were.
        """
        return nullcontext()

    @property
    def exclusive(self) -> tuple[str, ...]:
        """What no other scheme may do beside this one, whatever the model, in words that go on from ``they``."""
        return ()

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
