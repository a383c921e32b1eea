"""Telling transformers that each row of a batch is one sequence, which it looks up in the values of the positions.

Where it finds so, attention needs no mask but the triangle that its kernels know. On fake tensors there are no values
to look at: it then builds a mask of batch times length times length, which no real step has, and by which a simulation
of a CUDA device would choose another kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import masking_utils


@contextmanager
def one_a_row() -> Iterator[None]:
    """Let models take no row of a batch for several packed sequences inside the block."""
    looks_up: Any = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks_up
