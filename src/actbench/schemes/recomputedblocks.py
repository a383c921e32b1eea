from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt, field_validator
from torch import nn

from actbench.errors import ConversionError, NothingToConvertError
from actbench.nn.recomputed import RecomputedForward, blocks, repeated
from actbench.nn.replacement import census
from actbench.nn.wrapped import bind_entries, unbind_entries
from actbench.results.records import Site
from actbench.schemes.base import BLOCKS, Change, Scheme
from actbench.setup import Part, TrainingSetup

_IDLE = "they are in evaluation mode, where blocks run but once; put them in training mode"


class RecomputedBlocks(Scheme):
    """The blocks of a model run again in the backward pass.

    A subclass gives the docstring, the names of the registry, and the forward to bind on a block.
    """

    rank: ClassVar[int] = 30
    claims: ClassVar[tuple[str, ...]] = (BLOCKS,)
    becomes: ClassVar[str] = "recomputed"

    every: PositiveInt = 1
    blocks: tuple[str, ...] = ()

    @field_validator("blocks")
    @classmethod
    def _classes(cls, blocks: tuple[str, ...]) -> tuple[str, ...]:
        for name in blocks:
            if "/" in name:  # the separator of names in specifications
                raise ValueError(f"{name!r} is not the name of a class")
        return blocks

    @property
    def changes(self) -> tuple[Change, ...]:
        """What runs again in the backward pass."""
        return ("recomputation",)

    @property
    def period(self) -> int | None:
        """One of ``every`` blocks is recomputed."""
        return None if self.only else self.every

    def bound(self, block: nn.Module, path: str) -> RecomputedForward:
        """Return the forward to bind on a block at this path."""
        raise NotImplementedError

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with its blocks changed; if none is known, the repeated modules of its whole model."""
        if self.blocks or blocks(setup.module):
            return super().apply(setup)
        names = {type(block).__name__: None for _, block in repeated(setup.module)}
        return super(RecomputedBlocks, self.model_copy(update={"blocks": tuple(names)})).apply(setup)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a recomputing forward on the blocks.

        Raises:
            ConversionError: The model has no blocks, or recomputes them already.
        """
        found = blocks(setup.module, self.blocks)
        if not found:
            wanted = f"no module of class {' or '.join(self.blocks)}" if self.blocks else "no block that actbench knows"
            raise NothingToConvertError(
                f"{self.name}: {type(setup.module).__name__} has {wanted}; name the classes of its blocks, such as "
                f"{self.name},blocks=MyBlock; it holds {census(setup.module, containers=True)}"
            )
        chosen = found[:: self.every]
        if any(RecomputedForward.of(block) for _, block in chosen):
            raise ConversionError(f"{self.name}: the model recomputes its blocks already; convert the original model")
        unbind_entries(setup.module)
        for path, block in chosen:
            self.bound(block, setup.path_of(path)).bind()
        bind_entries(setup.module)  # in front: a block that a step calls itself is a pass, and is recomputed inside it
        sites = tuple(Site(path=path, was=type(block).__name__, becomes=self.becomes) for path, block in chosen)
        return setup.changed(setup.module, sites, by=Part(self.spec, acts=RecomputedForward, idle=_IDLE))
