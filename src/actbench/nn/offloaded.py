"""A model whose saved tensors wait in host memory for the backward pass (Rhu et al., "vDNN", arXiv 1602.08124)."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from actbench import savedtensors
from actbench.nn.keeping.transfer import Transfer, is_elsewhere
from actbench.nn.layout import without_repeats
from actbench.nn.sharing import SharingTable
from actbench.nn.wrapped import HookWrapper, Inner, WrappedForward
from actbench.units import KIB

HOST = "host memory is where it is"
"""Why a tensor of a model on the CPU is not moved."""

OFFLOAD = ("offload", "it works by saved-tensor hooks, which torch.compile does not trace")
"""What cannot be compiled, and why."""

_SMALLEST_BYTES = KIB  # below this a copy costs more time than its bytes are worth


@dataclass(frozen=True, eq=False)
class StaysHere:
    """A saved tensor that is left where it is.

    Attributes:
        tensor: The tensor, without its graph: a node that saves its own output would hold itself for ever.
        version: Its version when it was saved: with hooks around it, autograd itself does not look.
    """

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: It was changed in place after it was saved, as autograd says without hooks.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


@dataclass(frozen=True, eq=False)
class OnHost:
    """A saved tensor in host memory.

    Attributes:
        host: Its values, once each: a dimension of stride 0 has size 1 here.
        shape: Its shape.
        device: Where it was.
        transfer: What moved it.
    """

    host: Tensor
    shape: torch.Size
    device: torch.device
    transfer: Transfer

    def unpack(self) -> Tensor:
        """Return the tensor on the device where it was.

        Raises:
            RuntimeError: It was changed in place while it was being copied.
        """
        (tensor,) = self.transfer.back((self.host,), self.device)
        return tensor.expand(self.shape)


class Offloading(HookWrapper):
    """Hooks around the passes through a model by which what is saved goes to host memory.

    Parameters, buffers and what is smaller than 1 KiB stay. The rest is moved by a
    :class:`~actbench.nn.keeping.transfer.Transfer`, beside what the device computes: one that leaves is held until the
    next leaves, and the next that will be asked for is fetched ahead.
    """

    uncompilable = OFFLOAD

    def __init__(self) -> None:
        self._sharing: SharingTable[OnHost] = SharingTable()
        self._transfer = Transfer()

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Run a pass under saved-tensor hooks."""
        own = {tensor.untyped_storage() for tensor in own_tensors(module)}

        def pack(tensor: Tensor) -> StaysHere | OnHost:
            reason = "a parameter or a buffer" if _is_own(tensor, own) else _why_not(tensor)
            if reason in (None, HOST):
                savedtensors.acted(OffloadedForward)
            if reason is not None:
                savedtensors.left(tensor, reason)
                return StaysHere(tensor.detach(), tensor._version)
            return self._moved(tensor)

        try:
            with self.running(), saved_tensors_hooks(pack, _unpack):
                return inner(module, *args, **kwargs)
        finally:
            self._transfer.settle()

    def _moved(self, tensor: Tensor) -> OnHost:
        moved = self._sharing.recall(tensor)
        if moved is None:
            (host,) = self._transfer.away((without_repeats(tensor.detach()),))
            moved = OnHost(host, tensor.shape, tensor.device, self._transfer)
            savedtensors.packed(tensor, host, by=OffloadedForward)
            self._sharing.remember(tensor, weakref.ref(moved))
        return moved


class OffloadedForward(WrappedForward):
    """A forward whose saved tensors go to host memory."""

    wrapper: Offloading

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.wrapper = Offloading()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as a pass.

        Raises:
            ConversionError: Under ``torch.compile``, without gradients too.
        """
        self.wrapper.refuse_compiling()
        return super().__call__(*args, **kwargs)


def _is_own(tensor: Tensor, own: Container[torch.UntypedStorage]) -> bool:
    """Return whether a tensor is a parameter or a buffer; those of another part of the model are parameters by type."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or tensor.untyped_storage() in own


def _unpack(packed: StaysHere | OnHost) -> Tensor:
    return packed.unpack()


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Give parameters and buffers; a replica of ``nn.DataParallel`` names its parameters in a place of their own."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from vars(part).get("_former_parameters", {}).values()


def _why_not(tensor: Tensor) -> str | None:
    """Return why the bytes of a tensor stay, or None."""
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if tensor.nbytes < _SMALLEST_BYTES:
        return "smaller than 1 KiB"
    if type(tensor) not in (Tensor, nn.Parameter, FakeTensor):
        return f"a {type(tensor).__name__}"
    return None if is_elsewhere(tensor) else HOST
