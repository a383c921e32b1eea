"""The conditions of a training step: its types, the processes that run it, and where it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from actbench.scheme.microbatches import Batch


@dataclass(frozen=True)
class Precision:
    """The types and the memory format in which a step computes.

    Attributes:
        autocast: Type for ``torch.autocast``, or None for none.
        inputs: Type that floating-point tensors of a batch are cast to; None leaves them as they are.
        memory_format: Memory format that images of a batch are converted to; None leaves them as they are.
    """

    autocast: torch.dtype | None = None
    inputs: torch.dtype | None = None
    memory_format: torch.memory_format | None = None

    def cast(self, batch: Batch) -> Batch:
        """Return a batch with its floating-point tensors of ``inputs``, and images in ``memory_format``."""
        if self.inputs is None and self.memory_format is None:
            return batch
        cast: Batch = tree_map(self._cast, dict(batch))
        return cast

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if self.memory_format is not None and value.dim() == 4:  # images
            value = value.contiguous(memory_format=self.memory_format)
        return value if self.inputs is None else value.to(self.inputs)


@dataclass(frozen=True)
class Processes:
    """The processes that train together.

    Attributes:
        mesh: The processes by axis (``dp`` data, ``tp`` tensor parallel); None for one alone.
        average: Told before each pass whether gradients are averaged over processes in it; only the last of a step.
        gradient_buckets: Returns the tensors that gradients lie in, from step to step.
    """

    mesh: DeviceMesh | None = None
    average: Callable[[bool], None] = lambda last: None
    gradient_buckets: Callable[[], Sequence[Tensor]] = tuple


@dataclass(frozen=True)
class Limits:
    """Where a scheme, or a setup that schemes have changed, does not work.

    Attributes:
        untraceable: Why fake tensors do not show what each module saves; empty if they do. Such a step is simulated
            only if it is ``estimated``.
        estimated: Why the simulated bytes of a step that is ``untraceable`` are not quite those of a CUDA device, and
            its time is unknown; empty if it is not simulated.
        unsharded: Why FSDP does not go with the setup, as words after ``does not go with``; empty if it does.
    """

    untraceable: str = ""
    estimated: str = ""
    unsharded: str = ""

    @property
    def unsimulated(self) -> str:
        """Why a step is not simulated; empty if it is."""
        return "" if self.estimated else self.untraceable

    @classmethod
    def together(cls, limits: Sequence[Self]) -> Self:
        """Return the limits of several: the first reason of each kind."""
        unsimulated = [each.unsimulated for each in limits if each.unsimulated]
        untraceable = [*unsimulated, *(each.untraceable for each in limits if each.untraceable)]
        estimated = () if unsimulated else (each.estimated for each in limits)
        unsharded = (each.unsharded for each in limits)
        return cls(*(next(filter(None, found), "") for found in (untraceable, estimated, unsharded)))
