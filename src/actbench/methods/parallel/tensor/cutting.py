"""A model made into one process's part of it, in place: its Parameter objects stay, and are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actbench.errors import ConversionError
from actbench.methods.parallel.tensor.crossings import Entry, Exit, SequenceEntry, SequenceExit, SummedGradients
from actbench.methods.parallel.tensor.plan import Cut, Place, Plan
from actbench.methods.parallel.tensor.ranks import OwnNumbers, Ranks
from actbench.packing.replacement import is_conv1d


def check(model: nn.Module, plan: Plan, size: int, scheme: str) -> None:
    """Refuse a plan whose layers cannot be cut among the processes; nothing is changed.

    Raises:
        ConversionError: A layer is of a kind that is not cut, or its heads or widths do not divide.
    """
    for place in plan.places:
        layer: Any = model.get_submodule(place.path)
        inner = base(layer)
        if type(inner) is not nn.Linear and not is_conv1d(type(inner)):
            raise ConversionError(
                f"{scheme}: {place.path} is a {type(inner).__name__}, and only nn.Linear and Conv1D are cut; leave out "
                "the scheme that made it, or tp"
            )
        plain = hasattr(layer, "lora_A") and not len(
            getattr(layer, "lora_magnitude_vector", ())
        )  # DoRA's, of whole rows
        if inner is not layer and not plain:
            raise ConversionError(f"{scheme}: {place.path} has adapters that are not LoRA's, which are not cut")
        outputs, inputs = widths(inner)
        wide = (outputs // place.blocks if place.cut == "columns" else inputs) // place.unit
        if wide % size:
            what = "attention heads" if place.unit > 1 else "outputs" if place.cut == "columns" else "inputs"
            raise ConversionError(
                f"{scheme}: {place.path} has {wide} {what}, which do not divide among {size} processes; take one of "
                f"tp:{'|'.join(str(n) for n in range(2, wide + 1) if wide % n == 0) or '(none)'}"
            )


def share_layers(model: nn.Module, plan: Plan, ranks: Ranks, *, of_sequence: bool) -> None:
    """Cut the layers of a plan, in place, and put hooks where their tensors cross between processes.

    Args:
        model: The model.
        plan: What :func:`check` accepts for it.
        ranks: The processes.
        of_sequence: Whether each process has a part of the tokens outside of the layers that are cut.
    """
    numbers = OwnNumbers(ranks)
    inside = None if of_sequence else numbers
    for place in plan.places:
        layer = model.get_submodule(place.path)
        _cut_layer(layer, place, ranks)
        if place.cut == "rows":
            layer.register_forward_hook(Exit(ranks, inside, of_sequence=of_sequence), always_call=True)
    for path in plan.entries:
        module: Any = model.get_submodule(path)
        if isinstance(getattr(module, "split_size", None), int):  # how wide GPT-2 takes queries, keys and values to be
            module.split_size //= ranks.size
        module.register_forward_pre_hook(Entry(ranks, inside, of_sequence=of_sequence), with_kwargs=True)
    if of_sequence:
        blocks = list(model.get_submodule(plan.blocks).children())
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


def base(layer: nn.Module) -> nn.Module:
    """Return the layer inside of one with adapters, or the layer itself."""
    found: nn.Module = getattr(layer, "base_layer", layer)
    return found


def widths(layer: nn.Module) -> tuple[int, int]:
    """Return outputs and inputs of a linear layer."""
    found: Any = layer
    return (found.nf, found.nx) if is_conv1d(type(layer)) else (found.out_features, found.in_features)


def cut_adapters(layer: nn.Module, cut: Cut) -> list[nn.Module]:
    """Return the matrices of LoRA that are cut as the layer is: B by outputs, A by inputs."""
    return list(getattr(layer, "lora_B" if cut == "columns" else "lora_A", {}).values())


def cut_parameter(parameter: Tensor, dim: int, ranks: Ranks, blocks: int = 1) -> None:
    """Cut a parameter and its gradient down to this process's part, in place.

    Args:
        parameter: The whole.
        dim: The dimension that is cut.
        ranks: The processes.
        blocks: How many equal parts it has along the dimension; each part is cut.
    """
    gradient, parameter.grad = parameter.grad, None
    mine = _part(parameter.data, dim, ranks, blocks)
    parameter.data = mine.new_empty(0, dtype=torch.float64 if mine.dtype == torch.float32 else torch.float32)
    parameter.data = mine  # twice: autograd forgets the shape of what ran before only where the type changes
    if gradient is not None:
        parameter.grad = _part(gradient, dim, ranks, blocks)


def _part(whole: Tensor, dim: int, ranks: Ranks, blocks: int) -> Tensor:
    parts = [ranks.part(block, dim) for block in whole.chunk(blocks, dim)]
    return torch.cat(parts, dim)  # a copy also of one alone, so that the whole is freed


def _cut_layer(layer: nn.Module, place: Place, ranks: Ranks) -> None:
    inner: Any = base(layer)
    turned = is_conv1d(type(inner))
    of_columns = place.cut == "columns"
    cut_parameter(inner.weight, int(of_columns is turned), ranks, place.blocks)
    if of_columns:
        if inner.bias is not None:
            cut_parameter(inner.bias, 0, ranks, place.blocks)
    elif inner.bias is not None and ranks.rank:
        # outputs of all processes are summed, so the first alone adds the bias
        zeros = torch.zeros_like(inner.bias, requires_grad=False)
        del inner._parameters["bias"]
        inner.register_buffer("bias", zeros)
    adapters: list[Any] = cut_adapters(layer, place.cut)
    for matrix in adapters:
        cut_parameter(matrix.weight, 0 if of_columns else 1, ranks, place.blocks)
    widths = ("out_features", "nf") if of_columns else ("in_features", "nx")
    for each in {layer, inner, *adapters}:
        own = vars(each)  # what the layer says of its widths
        own.update({name: own[name] // ranks.size for name in widths if isinstance(own.get(name), int)})
