"""A model whose saved tensors wait in host memory for the backward pass (Rhu et al., "vDNN", arXiv 1602.08124)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actbench.nn import savedtensors
from actbench.nn.saved import Exclude, HostOffload, Identity, Packed, SavedTensors, SiteState
from actbench.nn.saved.packer import ON_HOST, StaysHere, own_tensors
from actbench.nn.wrapped import HookWrapper, Inner, WrappedForward
from actbench.units import KIB

OFFLOAD = ("offload", "it works by saved-tensor hooks, which torch.compile does not trace")
"""What cannot be compiled, and why."""

_SMALLEST_BYTES = KIB  # below this a copy costs more time than its bytes are worth


class Offloading(HookWrapper):
    """Hooks around the passes through a model by which what is saved goes to host memory.

    Parameters, buffers and what is smaller than 1 KiB stay. The rest is moved by a
    :class:`~actbench.nn.saved.HostOffload`, beside what the device computes: one that leaves is held until the next
    leaves, and the next that will be asked for is fetched ahead.
    """

    uncompilable = OFFLOAD

    def __init__(self) -> None:
        exclude = Exclude(_SMALLEST_BYTES, subclasses=True)
        self.packer = SavedTensors(Identity(), exclude=exclude, placement=HostOffload())

    def run(self, entry: str, module: nn.Module, inner: Inner, args: Any, kwargs: Any) -> Any:
        """Run a pass under saved-tensor hooks."""
        self.packer.exclude.add(own_tensors(module))
        try:
            with self.running(), saved_tensors_hooks(self._pack, _unpack):
                return inner(module, *args, **kwargs)
        finally:
            self.packer.settle()

    def _pack(self, tensor: Tensor) -> StaysHere | Packed:
        reason = self.packer.why_not(tensor)
        if reason is None:
            return self.packer.pack(tensor, SiteState("", 8 * tensor.element_size()))
        savedtensors.left(tensor, reason)
        if reason == ON_HOST:
            savedtensors.acted(self.packer)
        return StaysHere.of(tensor)


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


def _unpack(saved: StaysHere | Packed) -> Tensor:
    return saved.unpack()
