from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch.distributed.device_mesh import DeviceMesh

from actbench.nn.parallel.mesh import DATA, mesh_along
from actbench.schemes.base import DATA_PARALLEL, PLACEMENT, Change, Scheme
from actbench.setup import TrainingSetup


class DataParallel(Scheme):
    """Processes train one model with batches of their own; what each has of it, a subclass says."""

    positional: ClassVar[str | None] = "ranks"
    rank: ClassVar[int] = 80  # around what all others have made of modules and optimizer

    ranks: Annotated[int, Field(ge=2, le=1 << 16)] = 8

    @property
    def changes(self) -> tuple[Change, ...]:
        """Where the model is."""
        return (PLACEMENT,)

    @property
    def claims(self) -> tuple[str, ...]:
        """One scheme shares the model out over batches."""
        return (DATA_PARALLEL,)

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """The processes, along the axis of data."""
        return {DATA: self.ranks}

    @classmethod
    def worth_trying(cls, batch_size: int) -> tuple[str, ...]:
        """None: ``actbench fit`` asks what fits on one card."""
        return ()

    def _mesh(self, setup: TrainingSetup) -> DeviceMesh:
        """Return the processes; a ConversionError if there are not as many."""
        return mesh_along(DATA, setup.mesh, setup.module, self.ranks, self.spec)
