"""bitsandbytes' 8-bit Adam, an optional package, such that it runs on fake tensors and says what is in host memory."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import ConversionError, MeasurementError
from actbench.ops import hostmemory
from actbench.optim.optimizers import adam_groups, is_decoupled
from actbench.optim.shards import is_spread

_PAGED_FROM: Final = 100_000  # elements of a parameter whose moments bitsandbytes pages
_FLOATS: Final = 5  # float32 copies that its step on a CPU makes: both moments, the gradient, a root and what divides


def blockwise_adam(inner: optim.Optimizer, *, paged: bool) -> optim.Optimizer:
    """Return bitsandbytes' twin of torch's Adam or AdamW, for the same parameters, groups and options.

    Args:
        inner: Has not stepped.
        paged: Whether moments of parameters of at least 100,000 elements lie in memory that CUDA moves between the
            device and the host; on a CPU nothing moves.

    Raises:
        ConversionError: It is Adam with weight decay, which bitsandbytes has in the form of AdamW only, or of DTensors.
        MeasurementError: bitsandbytes is not installed.
    """
    kind = adapted()
    if not is_decoupled(inner) and any(group["weight_decay"] for group in inner.param_groups):
        raise ConversionError(
            "adam8bit: bitsandbytes decays weights as AdamW does, and the optimizer is Adam with weight_decay; take "
            "--optimizer adamw, or adam8bit of torchao"
        )
    groups = adam_groups(inner)
    if any(is_spread(each) for group in groups for each in group["params"]):
        raise ConversionError(
            "adam8bit:bnb: a parameter is a DTensor, as FSDP2 makes them, which bitsandbytes' operators do not take; "
            "take adam8bit of torchao, or smaq,on=state"
        )
    away = any(hostmemory.is_elsewhere(each) for group in groups for each in group["params"])
    made: optim.Optimizer = kind(groups, is_paged=paged and away)
    return made


@functools.cache
def adapted() -> type[Any]:
    """Return bitsandbytes' class; a MeasurementError where it is not installed."""
    try:
        kind: Any = importlib.import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        raise MeasurementError(
            f'adam8bit:bnb needs bitsandbytes: pip install "actbench[bitsandbytes]" ({error})'
        ) from None

    class BlockwiseAdamW(kind):  # type: ignore[misc]
        __doc__ = kind.__doc__

        def fill_qmap(self) -> None:
            """Make the levels that codes stand for; of fake parameters without values."""
            if any(_is_fake(each) for group in self.param_groups for each in group["params"]):
                self.name2qmap = {name: torch.empty(256) for name in ("dynamic", "udynamic")}
            else:
                super().fill_qmap()

        def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
            """Return a moment of zeros, marked where it lies in host memory."""
            buffer = torch.zeros_like(p, dtype=dtype) if _is_fake(p) else super().get_state_buffer(p, dtype)
            _mark(buffer, self.is_paged)
            return buffer

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            """Step a parameter; a fake one with what its step would allocate."""
            super().update_step(group, p, gindex, pindex)
            if _is_fake(p):
                _allocate_as_a_step(p)

        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            """Load a state of this optimizer; a ValueError for one of torch's."""
            if any("exp_avg" in each for each in state_dict["state"].values()):
                raise ValueError("the loaded state is of torch's Adam, which bitsandbytes cannot round; begin anew")
            super().load_state_dict(state_dict, move_to_device)

    BlockwiseAdamW.__name__ = kind.__name__  # by which records know it
    return BlockwiseAdamW


def _mark(buffer: Tensor, paged: bool) -> None:
    """Say where a moment is that bitsandbytes pages, or would page if it were not fake."""
    if getattr(buffer, "is_paged", paged and _is_fake(buffer) and buffer.numel() >= _PAGED_FROM):
        hostmemory.mark(buffer.untyped_storage())


def _allocate_as_a_step(parameter: Tensor) -> None:
    """Make what a step on a CPU makes and frees; on CUDA it is one kernel."""
    if not hostmemory.is_elsewhere(parameter):
        copies = _FLOATS + (parameter.dtype != torch.float32)
        _ = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(copies)]


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)
