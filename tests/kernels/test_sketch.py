"""kernels/sketch.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

import pytest
import torch

from actbench.methods.randomized.ops import halves, matrix as sketch
from actbench.methods.randomized.ops.sketch import project

SHAPES = ((0, 0, 5), (0, 1, 1), (3, 1, 7), (1, 5, 63), (0, 1, 257), (7, 13, 331), (2**40, 2, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", sketch.KINDS)
def test_columns_are_the_reference(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for seed in (0, -1, 0x1234_5678_9ABC_DEF0):
        for first, columns, size in SHAPES:
            for copies in (1, 2):
                given = first, columns, size, kind, dtype
                expected = sketch.reference(torch.tensor(seed), *given, copies)
                made = sketch.launching_maker(*given, copies, device)(torch.tensor(seed, device=device))

                assert torch.equal(made.cpu(), expected)
                assert made.stride() == expected.stride() == (1, sketch.space(size))


@pytest.mark.parametrize("kind", sketch.KINDS)
def test_a_part_is_the_part_of_the_whole(kind: str, device: torch.device) -> None:
    seed = torch.tensor(11, device=device)
    whole = sketch.launching_maker(0, 9, 37, kind, torch.float32, 1, device)(seed)

    for first in range(9):
        part = sketch.launching_maker(first, 9 - first, 37, kind, torch.float32, 1, device)(seed)
        assert torch.equal(part, whole[:, first:])


SPECIAL = (0.0, -0.0, 1.0, 1 / 3, 3e38, 1e-30, 1e-36, 1e-39, 1e-45, float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize("scale", [1.0, 819**-0.5])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 5), (37, 41), (2, 12)], ids=str)
def test_halves_are_the_reference(shape: tuple[int, int], scale: float, device: torch.device) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)[: x.numel()]

    found = halves.launch(x.to(device), scale).cpu()

    torch.testing.assert_close(found, halves.reference(x, scale), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sketch.KINDS)
def test_the_operator_reaches_the_kernel_beyond_two_to_the_31_entries(kind: sketch.Kind) -> None:
    seed, columns, size = torch.tensor(3, device="cuda"), 2**16 + 1, 2**15 + 3

    made = sketch.sketch_columns(seed, 0, columns, size, kind, torch.float16)

    for column in (0, 2**31 // size, columns - 1):
        expected = sketch.reference(seed.cpu(), column, 1, size, kind, torch.float16)
        assert torch.equal(made[:, column : column + 1].cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(4096, 768), (4096, 3072), (1000, 33), (65, 1)])
def test_a_cards_sketch_of_signs_is_the_exact_one(rows: int, width: int, dtype: torch.dtype) -> None:
    """A number is off by at most 2**-17 of it; units add 16 products at a time in float32, and may cut off the rest."""
    x, seed, size = torch.randn(rows, width, device="cuda").to(dtype), torch.tensor(5, device="cuda"), max(1, rows // 5)

    found = project(x, seed, size, "rademacher")

    exact = project(x.double(), seed, size, "rademacher")
    assert found.dtype == torch.float32
    assert (found - exact).norm() <= (2**-16 + rows / 16 * 2**-24) * exact.norm()


@pytest.mark.gpu
def test_a_card_has_no_more_bytes_than_a_piece_beside_the_sketch() -> None:
    x, seed, size = torch.randn(4096, 768, device="cuda"), torch.tensor(5, device="cuda"), 819
    project(x, seed, size, "rademacher")
    torch.cuda.empty_cache()  # of free blocks, a rest of less than 1 MiB is not cut off
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    made = project(x, seed, size, "rademacher")

    entries = 2 * (2 * 4096 * sketch.space(size) - (sketch.space(size) - size))
    of_halves = x.nbytes
    allowed = made.nbytes + entries + of_halves + 3 * 512  # blocks of 512 bytes
    assert torch.cuda.max_memory_allocated() - before <= allowed
