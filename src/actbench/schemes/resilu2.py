from __future__ import annotations

from typing import ClassVar

from actbench.schemes.regelu2 import ReGELU2


class ReSiLU2(ReGELU2):
    """SiLU keeps 2 bits per element: which side of three thresholds it is on.

    Paper: Yang et al., "Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing Backpropagation",
    arXiv 2406.16282.
    Kept for backward: ``ceil(elements * 2 / 8)`` bytes. The forward pass is exact; the derivative in backward is that
    of the sum of three ReLUs that is nearest to SiLU in the L2 norm of the function.
    Not reproduced: the memory-sharing norms. Thresholds and levels are solved here, from the authors' objective.
    """

    name: ClassVar[str] = "resilu2"
    summary: ClassVar[str] = "SiLU keeps 2 bits per element; its derivative becomes that of a sum of three ReLUs"
    functions: ClassVar[tuple[str, ...]] = ("silu",)
