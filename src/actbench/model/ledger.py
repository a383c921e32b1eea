"""Every tensor that a training step saves for backward: the JSON format of ``measure --ledger``, in bytes."""

from __future__ import annotations

import re

from actbench.model.data import Data
from actbench.units import NonNegativeInt

OUTSIDE = "<outside>"
"""The module of tensors that the loss function saves after the model has returned."""


def display_path(module: str) -> str:
    """Return the path of a module as users see it."""
    return {"": "(the model)", OUTSIDE: "(outside)"}.get(module, module)


class SavedTensor(Data):
    """One argument that one operator saves for backward.

    Attributes:
        module: Path of the module that ran the operator; empty for the model itself, :data:`OUTSIDE` for none.
        operator: The node of autograd's graph, such as ``ConvolutionBackward0``; outside the graph, the operator that
            made the tensor.
        argument: Name of the argument in the node; several if a scheme packs one tensor in several parts.
        shape: Shape before a scheme packed the tensor; likewise ``dtype``.
        bits: Bits per element, from the bytes of all parts.
        kept_bytes: Bytes of its storages that no earlier entry holds; 0 if all are counted already, or elsewhere.
        packed: Whether a scheme saves something else in its place.
        shared_with: Module, operator and argument of other entries that hold one of its storages.
        reason: Why it is not counted, or why a scheme did not pack it.
    """

    module: str
    operator: str
    argument: str
    shape: tuple[NonNegativeInt, ...]
    dtype: str
    bits: float
    kept_bytes: NonNegativeInt
    packed: bool = False
    shared_with: tuple[str, ...] = ()
    reason: str | None = None


class Ledger(Data):
    """Every saved tensor of a step, in the order in which the model runs.

    ``recomputed`` counts the tensors that a recomputed part of the model does not save.
    """

    entries: tuple[SavedTensor, ...]
    recomputed: NonNegativeInt = 0

    @property
    def total_bytes(self) -> int:
        """Bytes saved by the whole step, each storage counted once."""
        return sum(entry.kept_bytes for entry in self.entries)


_NUMBER = re.compile(r"(^|_)[0-9]+$")


def of_blocks(path: str) -> str:
    """Return one path for the same module of all blocks: ``encoder.layer.*.output``; a number at the end stays.

    A block may have its number in its name, as those of torchvision: ``encoder_layer_*.mlp``.
    """
    *blocks, last = path.split(".")
    return ".".join([*(_NUMBER.sub(r"\1*", part) for part in blocks), last])
