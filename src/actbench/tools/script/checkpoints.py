"""``torch.save`` and ``torch.load`` of a simulated run: shapes of tensors are kept in mind, and no file is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from actbench.simulator import known
from actbench.simulator.places import is_made_of_others, is_on_card
from actbench.tools.script.arrivals import rebound
from actbench.tools.script.saving import holds_fake

Note = Callable[[str], None]

_WRITES_NOTHING = "torch.save writes nothing: tensors of a simulated run have no values."


@dataclass(frozen=True)
class _Saved:
    """What a file would hold of a tensor; ``value`` is a copy of its values, if they are known.

    ``storage`` is the number of the storage, and ``elements`` how many it has: tensors that share one are read so.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    elements: int
    dtype: torch.dtype
    is_on_card: bool
    is_parameter: bool
    requires_grad: bool
    value: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Saved:
        storage, value = tensor.untyped_storage(), known.value_of(tensor)
        if value is not None:
            with torch._C._DisableTorchDispatch():
                value = value.detach().clone()
        return cls(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            storage=storage._cdata,
            elements=storage.nbytes() // tensor.element_size(),
            dtype=tensor.dtype,
            is_on_card=is_on_card(tensor),
            is_parameter=isinstance(tensor, nn.Parameter),
            requires_grad=tensor.requires_grad,
            value=value,
        )

    def read(self, map_location: Any, storages: dict[Any, Tensor]) -> Tensor:
        """Return a new tensor like the saved one; ``storages`` are those that were read before from this file."""
        device = _place_of(map_location) or ("cuda" if self.is_on_card else "cpu")
        if self.value is not None:
            made = self.value.clone().to(device)
        else:
            key = self.storage, self.dtype
            if key not in storages:
                storages[key] = torch.empty(self.elements, dtype=self.dtype, device=device)
            made = storages[key].as_strided(self.shape, self.stride, self.offset)
        if self.is_parameter:
            return nn.Parameter(made, self.requires_grad)
        return made.requires_grad_(self.requires_grad)


def _place_of(map_location: Any) -> Any:
    """Return the device that ``torch.load`` is asked for; None for where a tensor was.

    A function is taken for one that leaves tensors in host memory, as ``lambda storage, location: storage`` does.
    """
    if isinstance(map_location, dict):
        return map_location.get("cuda:0", map_location.get("cuda"))
    return "cpu" if callable(map_location) else map_location


@contextmanager
def kept_in_mind(note: Note) -> Iterator[None]:
    """Inside the block, let ``torch.load`` return what ``torch.save`` was given for the same file.

    A file is not written if it would hold fake tensors, in containers or as they are. Modules and other objects with
    such tensors are neither written nor kept.
    """
    contents: dict[str | int, tuple[Any, Any]] = {}  # with the file itself, so that no other object gets its number

    def saving(own: Callable[..., None]) -> Callable[..., None]:
        def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            contents.pop(_place(f), None)
            if not holds_fake(obj):
                return own(obj, f, *args, **options)
            note(_WRITES_NOTHING)
            found = tree_map(
                lambda leaf: _Saved.of(leaf) if isinstance(leaf, Tensor) and not is_made_of_others(leaf) else leaf, obj
            )
            if not holds_fake(found):
                contents[_place(f)] = f, found
            return None

        return save

    def loading(own: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
            if _place(f) not in contents:
                return own(f, map_location, *args, **options)
            storages: dict[Any, Tensor] = {}
            return tree_map(
                lambda leaf: leaf.read(map_location, storages) if isinstance(leaf, _Saved) else leaf,
                contents[_place(f)][1],
            )

        return load

    with rebound(torch, "save", saving), rebound(torch, "load", loading):
        yield


def _place(file: Any) -> str | int:
    """Return the path of a file, or the number of an object that has none, such as a buffer."""
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return os.path.abspath(path) if isinstance(path, str | os.PathLike) else id(file)
