"""A model spread over the processes that train it: a copy in each (DDP), or a share of its parameters in each (FSDP2).

The module of a setup stays what it is, with the names of its parameters; schemes have been applied to it before.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from actbench.learning.team import Team
from actbench.training import TrainingSetup


class Spread:
    """A setup in one process.

    Attributes:
        setup: Its loss runs the model as it is spread.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup

    def average(self, wanted: bool) -> None:
        """Say whether the next backward pass averages the gradients, or adds to those of this process alone."""

    def agree(self) -> None:
        """Give all processes the buffers of the first: running statistics are of a process's own share of the data."""

    def part(self) -> None:
        """Let each process hold no more than its share of the parameters, after a pass without a backward one."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor of which this process may hold a share, with those of the others; all must ask for it."""
        return tensor

    def like(self, tensor: Tensor, given: Tensor) -> Tensor:
        """Return a whole tensor as another one of its shape is held: this process's share of it, or all."""
        return given


class SharedSpread(Spread):
    """A setup in several processes."""

    def agree(self) -> None:
        """Send the buffers of the first process to the others."""
        for buffer in self.setup.module.buffers():
            distributed.broadcast(buffer, src=0)


class Copies(SharedSpread):
    """A setup of which every process has a copy, with gradients averaged while the backward pass runs."""

    def __init__(self, setup: TrainingSetup) -> None:
        loss = setup.loss
        assert loss is not None
        # Gradients lie where they are averaged, so that there is one copy of them.
        self._parallel = parallel = DistributedDataParallel(setup.module, gradient_as_bucket_view=True)
        super().__init__(replace(setup, loss=lambda _, batch: loss(parallel, batch)))

    def average(self, wanted: bool) -> None:
        """As ``DistributedDataParallel.no_sync`` does."""
        self._parallel.require_backward_grad_sync = wanted


def spread(setup: TrainingSetup, team: Team) -> Spread:
    """Spread a model, whose weights are the same in every process, in place."""
    match team.launch.strategy:
        case "single":
            return Spread(setup)
        case "ddp":
            return Copies(setup)
        case "fsdp2":
            from actbench.learning.sharding import Shards  # imports as much as all of torch

            return Shards(setup, team)
