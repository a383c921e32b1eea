"""What a scheme says of itself for lists, ``actbench fit`` and the docs: plain data, the same for all its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from actbench.model.declared.schemes import Shorthand
from actbench.model.provenance import Published


@dataclass(frozen=True)
class Card:
    """The card of a scheme.

    Attributes:
        summary: One line for ``actbench schemes``.
        paper: Source of the method; empty if there is none.
        published: Figures that its authors published.
        rank: Order in which composed schemes are applied (low first): 10 replaces modules, 20 hooks modules,
            30 recomputes blocks, 40 wraps the whole model. Order in the specification does not matter.
        variants: What follows the name in each specification that ``actbench fit`` tries, the fastest first; a function
            of the batch size if they depend on it. A scheme without variants is not tried.
        leading: Variants that a fit looks at without a limit of the gradient's error; None for all. The others are
            in no plan of ``results/plans`` or ``results/fit``: one of another scheme is as small and faster.
        libraries: Modules that a sweep may import once, and not in the process of each case.
        keeps_updates: Whether the same gradients give bit for bit the same updates as without the scheme; None if this
            follows from whether it changes the optimizer.
        draws_alike: Whether dropout draws the masks of the exact model; else gradients are compared without dropout.
        extras: Extras of its package that some values of the scheme need, each with its purpose: "adapters of peft".
        trainer: Arguments of the Hugging Face Trainer that do the same, each with the field whose value it takes.
        is_example: Whether messages name it where they say what changes of its kind lower a peak; few schemes are.
        compiles: Whether messages name it where they say what ``torch.compile`` takes; few schemes are.
        alternative: A specification that does what it and another scheme would do together, where the two exclude each
            other; empty if there is none.
        shorthands: Flags that stand for it; those of schemes that ship with actbench are in every ``--help``.
    """

    summary: str
    paper: str = ""
    published: tuple[Published, ...] = ()
    rank: int = 10
    variants: tuple[str, ...] | Callable[[int], tuple[str, ...]] = ("",)
    leading: tuple[str, ...] | None = None
    libraries: tuple[str, ...] = ()
    keeps_updates: bool | None = None
    draws_alike: bool = True
    extras: Mapping[str, str] = field(default_factory=dict)
    trainer: Mapping[str, str] = field(default_factory=dict)
    is_example: bool = False
    compiles: bool = False
    alternative: str = ""
    shorthands: tuple[Shorthand, ...] = ()

    def variants_for(self, batch_size: int) -> tuple[str, ...]:
        """Return what follows the name in each specification that is worth trying for so many rows."""
        return self.variants(batch_size) if callable(self.variants) else self.variants

    def leading_for(self, batch_size: int) -> tuple[str, ...]:
        """Return those of them that are worth trying if the gradient's error has no limit."""
        return self.variants_for(batch_size) if self.leading is None else self.leading
