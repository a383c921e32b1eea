"""kernels/sketch.cu, run on the host: bit for bit what the torch reference gives."""

from __future__ import annotations

import pytest
import torch

from actbench.ops import sketch
from actbench.ops.cuda import sketch as cuda

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("on_host")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", sketch.KINDS)
def test_rows_are_the_reference(kind: str, dtype: torch.dtype) -> None:
    for seed in (0, -1, 0x1234_5678_9ABC_DEF0):
        for first_row, rows, dim in (
            (0, 0, 5),
            (0, 1, 1),
            (3, 1, 7),
            (1, 5, 63),
            (0, 1, 257),
            (7, 13, 331),
            (2**40, 2, 9),
        ):
            expected = sketch.reference(torch.tensor(seed), first_row, rows, dim, kind, dtype, CPU)

            assert torch.equal(cuda.rows(seed, first_row, rows, dim, kind, dtype, CPU), expected)


@pytest.mark.parametrize("kind", sketch.KINDS)
def test_a_part_is_the_part_of_the_whole(kind: str) -> None:
    whole = cuda.rows(11, 0, 9, 37, kind, torch.float32, CPU)

    for first_row in range(9):
        part = cuda.rows(11, first_row, 9 - first_row, 37, kind, torch.float32, CPU)
        assert torch.equal(part, whole[first_row:])
