"""The step of an optimizer that a compiler makes one kernel of, as simulations see it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actbench.ops.library import EVERYWHERE, define


def _refuse(changed: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    raise NotImplementedError(
        "one_kernel stands for a compiled kernel on fake tensors; real ones have the kernel itself"
    )


@define("one_kernel(Tensor(a!)[] changed, Tensor[] read) -> ()", {EVERYWHERE: _refuse})
def one_kernel(changed: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """Read and write the tensors ``changed``, and read the tensors ``read``, all of them fake, with no temporaries.

    Raises:
        NotImplementedError: The tensors are real.
    """
