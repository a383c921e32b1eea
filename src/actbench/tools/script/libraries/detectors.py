"""torchvision's detectors, whose heads train on a sample of regions: a fixed number, of which a share is positive."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator import known
from actbench.tools.script.libraries.importpatches import Change, changed

Note = Callable[[str], None]


def changes(note: Note) -> dict[str, Change]:
    """Return the changes of torchvision, by the names of its modules."""

    def sampling(own: Callable[..., Any]) -> Callable[..., Any]:
        def select_training_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = own(self, *args, **kwargs)
            for labels in found[2]:
                _label(labels, int(self.fg_bg_sampler.batch_size_per_image * self.fg_bg_sampler.positive_fraction))
            note(
                "torchvision's detectors: as many of the sampled regions are taken to be positive as their sampler "
                "takes at most; masks and keypoints are computed of these."
            )
            return found

        return select_training_samples

    def change(module: ModuleType) -> Any:
        return changed(module.RoIHeads, "select_training_samples", sampling)

    return {"torchvision.models.detection.roi_heads": change}


def _label(labels: Any, positive: int) -> None:
    """Let unknown labels be 1 for so many regions, and 0, the background, for the others."""
    if type(labels) is FakeTensor and known.value_of(labels) is None:
        known.keep(labels, (torch.arange(labels.numel()) < positive).to(labels.dtype))
