"""Packed state of parameters that are spread over processes (DTensors, as FSDP2 makes them), and how it is saved.

Each process holds and steps the state of its own rows. What is saved is the same for every number of processes: packed
bytes of the whole parameter, in rows of whole blocks where those fill rows of the parameter, so that torch can cut them
as it cuts the parameter. Processes exchange nothing to save it. Where a shard ends within a block there are no such
rows: the values are gathered and packed anew when the state is saved, and packed anew for each shard when it is loaded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from actbench.errors import UsageError
from actbench.methods.formats.optim.storage import Storage, storage_of

if TYPE_CHECKING:  # at run time it is imported where there are DTensors: it takes more than a second
    from torch.distributed.tensor import DTensor


def is_spread(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    # by an attribute of DTensor, whose module takes more than a second to import
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def refuse_unknown_shards(parameter: Tensor) -> None:
    """Raise a UsageError for a DTensor that is spread otherwise than by rows over one dimension of its mesh."""
    if is_spread(parameter):
        cut = [placement for placement in parameter.placements if not placement.is_replicate()]
        # By its name, because what FSDP2 and tensor parallelism make together of one dimension is a Shard as well.
        if len(cut) > 1 or any(type(each).__name__ != "Shard" or not each.is_shard(0) for each in cut):
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} is a DTensor with placements {parameter.placements}; "
                "packed state is that of whole rows: shard parameters over dimension 0 and one dimension of the mesh, "
                "as fully_shard does by itself, or give such parameters a group with encoding=None"
            )


def local_of(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: rows of a DTensor, any other whole."""
    return tensor.to_local() if is_spread(tensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this process's rows of a gradient, which is first summed over the processes if it is not summed yet."""
    gradient = parameter.grad
    assert gradient is not None
    if is_spread(parameter) and is_spread(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_of(gradient)


def first_of(parameter: Tensor) -> int:
    """Return the index, in the whole parameter, of the first element that this process holds."""
    rows, of, rank = _cut(parameter)
    # DTensor cuts as torch.chunk does: all processes but the last have the quotient rounded up
    return min(rows, rank * -(-rows // of)) * parameter.shape[1:].numel()


def saved_from(packed: Tensor, parameter: Tensor, storage: Storage) -> Tensor:
    """Return the packed state of a parameter as it is saved, which is the same for any number of processes.

    Rows of whole blocks, uint8 ``(n, bytes)``, a DTensor where the parameter is one; or, where blocks do not end with
    rows of the parameter, the packed vector of the whole. All processes must call this.
    """
    if is_spread(parameter):
        if _fits(parameter, storage):
            rows = _in_rows(packed, parameter, storage, local_of(parameter).numel(), first_of(parameter))
            return _spread(rows, parameter, torch.Size(_saved_shape(parameter, storage)))
        local = local_of(parameter)
        values = storage.unpack(packed, local.numel(), first_of(parameter)).view(local.shape)
        whole = _on_mesh(values, parameter, parameter.shape).full_tensor().to(local.device)
        packed = storage.pack(whole.flatten())
    return _in_rows(packed, parameter, storage, parameter.numel()) if _rows_of_unit(parameter, storage) else packed


def loaded_from(saved: Tensor, parameter: Tensor, encoding: str, what: str) -> Tensor:
    """Return, as a copy, the packed state of what this process holds of a parameter.

    Args:
        saved: What :func:`saved_from` returned, or the whole of it where the parameter is a DTensor; or the packed
            vector of this process's part, or of the whole parameter.
        parameter: The parameter of the state.
        encoding: How it is stored.
        what: The state in words, for errors.

    Raises:
        UsageError: It is of another parameter or encoding, or a DTensor that is spread otherwise.
    """
    storage = storage_of(encoding)
    given = _same_cut(saved, parameter, what).to(device=local_of(parameter).device, copy=True)
    count, first, shape = local_of(parameter).numel(), first_of(parameter), tuple(saved.shape)
    expected, whole = _saved_shape(parameter, storage), (storage.packed_bytes(parameter.numel()),)
    if saved.dtype == torch.uint8 and shape == (storage.packed_bytes(count, first),) and not is_spread(saved):
        return given
    if saved.dtype == torch.uint8 and shape in (expected, whole):
        if is_spread(saved) or (shape == expected and count == parameter.numel()):
            return _from_rows(given, storage, first)
        return _part_of(given, parameter, storage)
    raise UsageError(
        f"{what} must be {math.prod(whole)} bytes as {encoding!r}, found {saved.dtype} {shape}; build the optimizer as "
        "it was saved"
    )


def _part_of(whole: Tensor, parameter: Tensor, storage: Storage) -> Tensor:
    """Return the packed state of this process's rows of a whole one, packed anew if blocks are cut."""
    count, first = local_of(parameter).numel(), first_of(parameter)
    if _fits(parameter, storage):
        rows = whole if whole.dim() == 2 else _in_rows(whole, parameter, storage, parameter.numel())
        each = parameter.numel() // len(rows)
        return _from_rows(rows[first // each : (first + count) // each], storage, first)
    flat = _from_rows(whole, storage) if whole.dim() == 2 else whole
    return storage.pack(storage.unpack(flat, parameter.numel())[first : first + count], first)


def _in_rows(packed: Tensor, parameter: Tensor, storage: Storage, count: int, first: int = 0) -> Tensor:
    """Return a packed vector as rows of bytes, each that of as few rows of the parameter as are whole units."""
    _, size = _saved_shape(parameter, storage)
    return storage.in_units(packed, count, first).view(-1, size)


def _from_rows(rows: Tensor, storage: Storage, first: int = 0) -> Tensor:
    return storage.from_units(rows.reshape(-1, storage.packed_bytes(storage.unit)), first)


def own_values(saved: Tensor, parameter: Tensor, what: str) -> Tensor:
    """Return this process's rows of a tensor of the parameter's shape, float32, a copy on the parameter's device."""
    given = _same_cut(saved, parameter, what)
    if is_spread(parameter) and not is_spread(saved):
        first, row = first_of(parameter), parameter.shape[1:].numel()
        given = given[first // row :][: len(local_of(parameter))] if row else given
    return given.to(device=local_of(parameter).device, dtype=torch.float32, copy=True)


def spread_as(local: Tensor, parameter: Tensor) -> Tensor:
    """Return rows as a DTensor where the parameter is one, and as they are where it is not."""
    return _spread(local, parameter, parameter.shape) if is_spread(parameter) else local


def _same_cut(saved: Tensor, parameter: Tensor, what: str) -> Tensor:
    """Return what this process has of saved state, of a DTensor only where it is cut as the parameter is."""
    if not is_spread(saved):
        return saved
    if not is_spread(parameter):
        raise UsageError(
            f"{what} is a DTensor and its parameter is not: gather the state first, by "
            "get_optimizer_state_dict(..., options=StateDictOptions(full_state_dict=True))"
        )
    if saved.placements != parameter.placements or saved.device_mesh != parameter.device_mesh:
        raise UsageError(
            f"{what} is a DTensor with placements {saved.placements}, and its parameter has {parameter.placements}; "
            "load it by torch.distributed.checkpoint into get_optimizer_state_dict(model, optimizer)"
        )
    return saved.to_local()


def _spread(local: Tensor, parameter: DTensor, shape: torch.Size) -> Tensor:
    """Return rows as a DTensor, on their device: under CPU offload it is not that of the mesh, which torch moves to."""
    return _on_mesh(local, parameter, shape).to(local.device)


def _on_mesh(local: Tensor, parameter: DTensor, shape: torch.Size) -> DTensor:
    from torch.distributed.tensor import DTensor

    # of the whole parameter, which DTensor cannot know from a part
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    # without the check, which is a collective
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _cut(parameter: Tensor) -> tuple[int, int, int]:
    """Return the rows of a parameter, over how many processes they are spread, and which of them this one is."""
    rows = parameter.shape[0] if parameter.dim() else 1
    if is_spread(parameter):
        refuse_unknown_shards(parameter)  # the encoding of a group may have been changed
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard():
                mesh = parameter.device_mesh
                return rows, mesh.size(dimension), mesh.get_local_rank(dimension)
    return rows, 1, 0


def _rows_of_unit(parameter: Tensor, storage: Storage) -> int:
    """Return how many rows of a parameter are whole units together; 0 where some are left at its end."""
    row = parameter.shape[1:].numel()
    together = storage.unit // math.gcd(row, storage.unit)
    return together if parameter.shape[0] % together == 0 else 0


def _saved_shape(parameter: Tensor, storage: Storage) -> tuple[int, ...]:
    together = _rows_of_unit(parameter, storage)
    if not together:
        return (storage.packed_bytes(parameter.numel()),)
    units = together * parameter.shape[1:].numel() // storage.unit
    return parameter.shape[0] // together, units * storage.packed_bytes(storage.unit)


def _fits(parameter: Tensor, storage: Storage) -> bool:
    """Return whether torch cuts rows of units where it cuts the parameter, in all processes."""
    rows, of, _ = _cut(parameter)
    together = _rows_of_unit(parameter, storage)
    return together > 0 and together * -(-(rows // together) // of) == -(-rows // of)
