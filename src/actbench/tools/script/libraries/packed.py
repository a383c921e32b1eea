"""bitsandbytes on tensors without values: its packed parameters, and memory that the driver pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.tools.script.libraries.importpatches import Change, changed, rebind

_PAGED_ELEMENTS = 100_000
"""Elements from which bitsandbytes lets the driver page a state."""

Note = Callable[[str], None]


def changes(note: Note) -> dict[str, Change]:
    """Return the changes of bitsandbytes, by the names of its modules."""

    def paged(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def get_state_buffer(self: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
            if not self.is_paged or p.numel() < _PAGED_ELEMENTS or p.device.type == "cpu":
                return own(self, p, dtype)
            note("bitsandbytes: states of paged optimizers are in memory that torch's allocator does not count.")
            state: Any = torch.zeros(p.shape, dtype=dtype, device="cpu")
            state.is_paged = True
            return state  # type: ignore[no-any-return]

        return get_state_buffer

    def without_outliers(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def matmul(
            a: Tensor, b: Tensor, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None
        ) -> Any:
            if isinstance(a, FakeTensor) and state is not None and state.threshold:
                note("bitsandbytes: no column of activations counts as an outlier; in 8 bits some columns stay in 16.")
                state.threshold = 0.0
            return own(a, b, out=out, state=state, threshold=0.0, bias=bias)

        return matmul

    return {
        "bitsandbytes.functional": lambda module: rebind(module, "prefetch_tensor", lambda own: lambda *tensors: None),
        "bitsandbytes.optim.optimizer": lambda module: changed(module.Optimizer8bit, "get_state_buffer", paged),
        "bitsandbytes.autograd._functions": lambda module: rebind(module, "matmul", without_outliers),
    }
