"""A model made into one process's part of it."""

from __future__ import annotations

from torch import nn

from actbench.nn.tensorparallel.crossings import Entry, Exit, SequenceEntry, SequenceExit, SummedGradients
from actbench.nn.tensorparallel.cutting import base, cut, cut_adapters
from actbench.nn.tensorparallel.drawing import OwnNumbers
from actbench.nn.tensorparallel.plan import Plan
from actbench.nn.tensorparallel.ranks import Ranks


def share_layers(model: nn.Module, plan: Plan, ranks: Ranks, *, of_sequence: bool) -> None:
    """Cut the layers of a plan, in place, and put hooks where their tensors cross between processes.

    Args:
        model: The model.
        plan: What :func:`~actbench.nn.tensorparallel.cutting.check` accepts for it.
        ranks: The processes.
        of_sequence: Whether each process has a part of the tokens outside of the layers that are cut.
    """
    cut(model, plan, ranks)
    blocks = list(model.get_submodule(plan.blocks).children())
    numbers = OwnNumbers(ranks)
    inside = None if of_sequence else numbers
    rows = {place.path for place in plan.places if place.cut == "rows"}
    for path in plan.entries:
        model.get_submodule(path).register_forward_pre_hook(
            Entry(ranks, inside, of_sequence=of_sequence), with_kwargs=True
        )
    for path in rows:
        model.get_submodule(path).register_forward_hook(Exit(ranks, inside, of_sequence=of_sequence), always_call=True)
    if of_sequence:
        blocks[0].register_forward_pre_hook(SequenceEntry(ranks, numbers), with_kwargs=True)
        blocks[-1].register_forward_hook(SequenceExit(ranks, numbers), always_call=True)
    for part in _uncut(model, plan, of_sequence=of_sequence):
        SummedGradients(ranks).bind(part)


def _uncut(model: nn.Module, plan: Plan, *, of_sequence: bool) -> list[nn.Module]:
    """Return the modules with parameters that all processes have and use with a part of the data each."""
    layers = {model.get_submodule(place.path): place.cut for place in plan.places}
    taken = {base(layer) for layer in layers}
    taken |= {matrix for layer, side in layers.items() for matrix in cut_adapters(layer, side)}
    around = [plan.blocks] if of_sequence else [*plan.entries, *(place.path for place in plan.places)]
    found = [part for path in around for part in model.get_submodule(path).modules() if part not in taken]
    return [part for part in dict.fromkeys(found) if any(True for _ in part.parameters(recurse=False))]
