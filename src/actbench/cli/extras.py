"""The extras of actbench: optional packages, what each is for, and which of them are installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from typing import NamedTuple

from actbench.machine import CUPY, version_of
from actbench.plugins import OURS

PURPOSES = {
    "cuda": "kernels of actbench's own on a GPU",
    "train": "metrics and charts of actbench train",
    "datasets": "data sets of the hub in actbench train",
    "distributed": "the Trainer of transformers",
    "torchao": "schemes adam8bit, adam4bit and adamfp8",
    "liger": "Liger's kernels on a GPU: schemes liger and chunked_loss:liger",
    "bitsandbytes": "scheme adam8bit:bnb",
    "peft": "schemes lora and qlora",
    "diffusers": "models sd-1.5-unet and sdxl-unet",
    "lightning": "the callback for Lightning",
    "html": "charts of --html and --export-timeline",
    "cluster": "--cluster, on the nodes of a Ray cluster",
}
"""What each extra is for; those that are not here are for the development of actbench."""


class Extra(NamedTuple):
    """One extra: ``versions`` are those of its packages, None for what is not installed."""

    name: str
    versions: dict[str, str | None]

    @property
    def is_installed(self) -> bool:
        """Whether all of its packages are."""
        return None not in self.versions.values()


def extras() -> Iterator[Extra]:
    """Yield the extras that a user may install, in the order of ``PURPOSES``."""
    wanted = importlib.metadata.requires(OURS) or []
    for name in PURPOSES:
        packages = [
            re.split(r"[^\w.-]", each)[0] for each in wanted if re.search(rf"""extra == ['"]{name}['"]""", each)
        ]
        if name == "cuda":  # the CuPy of another CUDA version does as well
            packages = [next(filter(version_of, CUPY), CUPY[0])]
        if packages:
            yield Extra(name, {package: version_of(package) for package in packages})
