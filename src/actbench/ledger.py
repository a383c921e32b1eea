"""The list of everything that a training step keeps for its backward pass: the shape of ``measure --ledger`` in JSON.

Nothing in this file, or in what it imports, imports torch. All amounts are in bytes.
"""

from __future__ import annotations

from actbench.counts import NonNegativeInt
from actbench.records import Data

OUTSIDE = "<outside>"
"""The module of what the loss function keeps after the model has returned."""


def called(module: str) -> str:
    """Return what people are told of the path of a module."""
    return {"": "(the model)", OUTSIDE: "(outside)"}.get(module, module)


class SavedTensor(Data):
    """One argument that one operator keeps for backward.

    Attributes:
        module: Path of the module that ran the operator; empty for the model itself, :data:`OUTSIDE` for none.
        operator: The node of autograd's graph, such as ``ConvolutionBackward0``; for what is held outside of the graph
            the operator that made it.
        argument: What the node calls it; several, where a scheme keeps one tensor in several parts.
        shape: Of the tensor, as it was before a scheme packed it.
        dtype: Its type, likewise.
        bits: Bits in which an element is kept, by the bytes of the parts: what belongs to a group is in it.
        kept_bytes: Bytes of its storages that no earlier entry holds; 0 where all are counted already or not here.
        packed: Whether a scheme keeps something else in its place.
        shared_with: Module, operator and argument of the other entries that hold one of its storages.
        reason: Why it is not counted, or why a scheme left it alone; None where there is nothing to say.
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

    Attributes:
        entries: One for each argument of an operator.
        recomputed: How many tensors a recomputed part of the model would have saved and does not.
    """

    entries: tuple[SavedTensor, ...]
    recomputed: NonNegativeInt = 0

    @property
    def total_bytes(self) -> int:
        """Bytes kept by the whole step, each storage counted once."""
        return sum(entry.kept_bytes for entry in self.entries)
