"""The data structures of a training step that a number format can store, and messages about them."""

from __future__ import annotations

from typing import Literal, get_args

from actbench.methods.formats.encodings import Encoding
from actbench.model.records import Unreached

Structure = Literal["weights", "gradients", "activations", "maps", "state"]
STRUCTURES: tuple[Structure, ...] = get_args(Structure)
_WITHOUT = "leave them out of on=; activations and maps work there"

WAS = {
    "weights": "weights",
    "gradients": "weight gradients",
    "activations": "activations",
    "maps": "gradient maps",
    "state": "optimizer state",
}
"""The five data structures in words."""


def replicated(what: str) -> tuple[str, str]:
    """Return what does not work with DDP, and why."""
    why = "each process would pack its gradients before they are averaged, and round its weights differently"
    return f"{what} in a number format", f"{why}; {_WITHOUT}"


def sharded(what: str) -> tuple[str, str]:
    """Return what does not work with FSDP, and why."""
    why = "each process holds a shard, whose ends are not those of the format's blocks, and FSDP reduces gradients"
    return f"{what} in a number format", f"{why} by itself; {_WITHOUT}"


def path(structure: Structure) -> str:
    """Return the path of a structure's site: the model's for activations, else its name in parentheses."""
    return "" if structure == "activations" else f"({WAS[structure]})"


def without_optimizer(encoding: Encoding) -> Unreached:
    """Return the report about the state of a setup without an optimizer."""
    what = (
        f'wrap it by actbench.optim.packed(optimizer, encoding="{encoding.spec}")'
        if encoding.stored
        else "apply the scheme to a TrainingSetup with make_optimizer, or leave state out of on="
    )
    return Unreached(path="", kind=WAS["state"], reason=f"the optimizer is not part of the model; {what}")
