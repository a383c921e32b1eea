"""What a CUDA context takes of a card beside a training step."""

from __future__ import annotations

from typing import Final

from actbench.units import GIB

CONTEXT_BYTES: Final = GIB // 2
"""What a process takes of a card before its first tensor: the context, and the code of kernels that the driver loads.

The kernels are those of torch, cuBLAS and cuDNN. NVML counts 0.3 to 0.6 GiB of it to a process, by card, driver and
libraries; no record can know."""
