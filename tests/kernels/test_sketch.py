"""kernels/sketch.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

import pytest
import torch

from actbench.methods.randomized.ops import matrix as sketch

CPU = torch.device("cpu")
SHAPES = ((0, 0, 5), (0, 1, 1), (3, 1, 7), (1, 5, 63), (0, 1, 257), (7, 13, 331), (2**40, 2, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", sketch.KINDS)
def test_rows_are_the_reference(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for seed in (0, -1, 0x1234_5678_9ABC_DEF0):
        for first_row, rows, dim in SHAPES:
            expected = sketch.reference(torch.tensor(seed), first_row, rows, dim, kind, dtype, CPU)

            assert torch.equal(sketch.launch(seed, first_row, rows, dim, kind, dtype, device).cpu(), expected)


@pytest.mark.parametrize("kind", sketch.KINDS)
def test_a_part_is_the_part_of_the_whole(kind: str, device: torch.device) -> None:
    whole = sketch.launch(11, 0, 9, 37, kind, torch.float32, device)

    for first_row in range(9):
        part = sketch.launch(11, first_row, 9 - first_row, 37, kind, torch.float32, device)
        assert torch.equal(part, whole[first_row:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sketch.KINDS)
def test_the_operator_reaches_the_kernel_beyond_two_to_the_31_entries(kind: sketch.Kind) -> None:
    seed, rows, dim = torch.tensor(3), 2**16 + 1, 2**15 + 3

    made = sketch.sketch_rows(seed, 0, rows, dim, kind, torch.float16, torch.device("cuda"))

    for row in (0, 2**31 // dim, rows - 1):
        expected = sketch.reference(seed, row, 1, dim, kind, torch.float16, CPU)
        assert torch.equal(made[row : row + 1].cpu(), expected)
