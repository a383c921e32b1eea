"""The one operator namespace of the package, ``torch.ops.actbench``.

Operators are made with ``define`` and ``impl``: the decorators cost two to four times as much per call, and that cost
would be part of every figure that is published.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

library = torch.library.Library("actbench", "DEF")  # type: ignore[no-untyped-call]  # registrations live as long

_internals: Any = torch._C
_modes, _transforms = _internals._len_torch_dispatch_stack, _internals._functorch.peek_interpreter_stack


def direct(tensor: Tensor) -> bool:
    """Return whether an operator on a tensor may be computed without the dispatcher, which costs 5 microseconds.

    That is on the CPU, where no one would see it go by: no tracer, no mode, no transform, no subclass.
    """
    if torch.compiler.is_compiling():
        return False
    return type(tensor) is Tensor and tensor.is_cpu and not _modes() and _transforms() is None
