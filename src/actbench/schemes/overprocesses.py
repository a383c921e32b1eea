from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch.distributed.device_mesh import DeviceMesh

from actbench.nn.parallel.mesh import DATA, mesh_along
from actbench.schemes.base import DATA_PARALLEL, PLACEMENT, Change, Scheme
from actbench.setup import TrainingSetup

Count = Annotated[int, Field(ge=2, le=1 << 16)]
"""How many processes train together."""


class OverProcesses(Scheme):
    """Several processes train one model, along one axis of their mesh; what each has of it, a subclass says."""

    axis: ClassVar[str]
    positional: ClassVar[str | None] = "ranks"
    variants: ClassVar[tuple[str, ...]] = ()  # ``actbench fit`` asks what fits on one card

    ranks: Count = 8

    @property
    def changes(self) -> tuple[Change, ...]:
        """Which process has what."""
        return (PLACEMENT,)

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """The processes, along the axis."""
        return {self.axis: self.ranks}

    def _mesh(self, setup: TrainingSetup) -> DeviceMesh:
        """Return the processes along the axis; a ConversionError if there are not as many."""
        return mesh_along(self.axis, setup.mesh, setup.module, self.ranks, self.spec)


class DataParallel(OverProcesses):
    """Each process trains with batches of its own."""

    axis: ClassVar[str] = DATA
    rank: ClassVar[int] = 80  # around what all others have made of modules and optimizer

    @property
    def claims(self) -> tuple[str, ...]:
        """One scheme shares the model out over batches."""
        return (DATA_PARALLEL,)
