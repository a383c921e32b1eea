"""Files of tensors that a simulated run saves: shapes are kept in mind, no file is written, and it loads them again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from actbench.simulator import known
from actbench.simulator.places import is_on_card, is_wrapper_subclass
from actbench.tools.script.libraries.importpatches import Change, rebind
from actbench.tools.script.libraries.saving import holds_fake

Note = Callable[[str], None]

_SUFFIXES = (".bin", ".ckpt", ".distcp", ".pkl", ".pt", ".pth", ".safetensors", ".tar")

_STAYS = "Files of weights that were there before the run stay as they are: it writes no others in their place."

_WRITES_NOTHING = "{} writes nothing: tensors of a simulated run have no values."


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

    def alone(self, number: int) -> _Saved:
        """Return what a safetensors file holds of the tensor: its elements in order, and no more of its storage."""
        elements, stride = 1, list[int]()
        for size in reversed(self.shape):
            stride.insert(0, elements)
            elements *= size
        return replace(
            self,
            stride=tuple(stride),
            offset=0,
            storage=number,
            elements=elements,
            is_parameter=False,
            requires_grad=False,
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


class Contents:
    """What files would hold that a simulated run saved, by their paths.

    Args:
        note: Receives a sentence about what is not written.
        is_ours: Whether a path is in a folder of ours, where an empty file stands for what was saved.
    """

    def __init__(self, note: Note, is_ours: Callable[[Any], bool]) -> None:
        self._note, self._is_ours, self._began = note, is_ours, time.time()
        self._kept: dict[str | int, tuple[Any, Any]] = {}  # with the file itself: no other object gets its number

    def keep(self, file: Any, found: Any) -> None:
        """Keep what a file would hold, with each tensor as a ``_Saved``."""
        self._kept[_place(file)] = file, found
        if self._is_ours(file):
            Path(file).touch()

    def leaves(self, file: Any) -> bool:
        """Return whether a file is one of weights that was there before this run, and note that it stays."""
        if not isinstance(file, str | os.PathLike) or not str(file).endswith(_SUFFIXES):
            return False
        try:
            is_older = os.stat(file).st_ctime < self._began
        except OSError:
            return False
        if is_older:
            self._note(_STAYS)
        return is_older

    def has(self, file: Any) -> bool:
        """Return whether this run has saved a file, which it has not written."""
        return _place(file) in self._kept

    def drop(self, file: Any) -> None:
        """Forget what a file would hold."""
        self._kept.pop(_place(file), None)

    def copy(self, file: Any, other: Any) -> None:
        """Let another file hold what one would hold, if this run has saved it."""
        if self.has(file):
            self._kept[_place(other)] = other, self._kept[_place(file)][1]

    def move(self, file: Any, other: Any) -> None:
        """Let another file hold what one would hold, in its place."""
        self.copy(file, other)
        self.drop(file)

    def keep_named(self, file: Any, tensors: Mapping[str, Tensor]) -> None:
        """Keep what a safetensors file would hold of named tensors."""
        self.keep(file, {name: _Saved.of(each).alone(number) for number, (name, each) in enumerate(tensors.items())})

    @contextmanager
    def of_torch(self) -> Iterator[None]:
        """Inside the block, let ``torch.load`` return what ``torch.save`` was given for the same file.

        A file is not written if it would hold fake tensors, in containers or as they are. Modules and other objects
        with such tensors are neither written nor kept. In a folder of ours real tensors are kept, too: torch reads
        no values of a file while tensors are fake.
        """

        def saving(own: Callable[..., None]) -> Callable[..., None]:
            def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
                self.drop(f)
                if holds_fake(obj):
                    self._note(_WRITES_NOTHING.format("torch.save"))
                elif not self._is_ours(f) and not self.leaves(f):
                    return own(obj, f, *args, **options)
                found = tree_map(
                    lambda leaf: (
                        _Saved.of(leaf) if isinstance(leaf, Tensor) and not is_wrapper_subclass(leaf) else leaf
                    ),
                    obj,
                )
                if not holds_fake(found):
                    self.keep(f, found)
                return None

            return save

        with rebind(torch, "save", saving), rebind(torch, "load", self._loading):
            yield

    def changes(self) -> dict[str, Change]:
        """Return the same of ``safetensors.torch``."""

        def saving(own: Callable[..., None]) -> Callable[..., None]:
            def save_file(tensors: Mapping[str, Tensor], filename: Any, *args: Any, **options: Any) -> None:
                self.drop(filename)
                if not holds_fake(tensors) and not self.leaves(filename):
                    return own(tensors, filename, *args, **options)
                self._note(_WRITES_NOTHING.format("safetensors.torch.save_file"))
                return self.keep_named(filename, tensors)

            return save_file

        def change(module: ModuleType) -> AbstractContextManager[object]:
            with ExitStack() as stack:
                stack.enter_context(rebind(module, "save_file", saving))
                stack.enter_context(rebind(module, "load_file", self._loading_named))
                return stack.pop_all()

        return {"safetensors.torch": change}

    def _loading(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
            return self._read(f, map_location) if self.has(f) else own(f, map_location, *args, **options)

        return load

    def _loading_named(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def load_file(filename: Any, device: Any = "cpu", **options: Any) -> Any:
            if self.has(filename):
                return self._read(filename, device)
            found = own(filename, **options)  # which would write into memory of the card
            return {name: each.to(device) for name, each in found.items()}

        return load_file

    def _read(self, file: Any, place: Any) -> Any:
        storages: dict[Any, Tensor] = {}
        return tree_map(
            lambda leaf: leaf.read(place, storages) if isinstance(leaf, _Saved) else leaf, self._kept[_place(file)][1]
        )


def _place(file: Any) -> str | int:
    """Return the path of a file, or the number of an object that has none, such as a buffer."""
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return os.path.abspath(path) if isinstance(path, str | os.PathLike) else id(file)
