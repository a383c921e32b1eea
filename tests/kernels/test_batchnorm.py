"""kernels/batchnorm.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

import pytest
import torch

from actbench.methods.actnn.ops import batchnorm
from actbench.methods.actnn.ops.batchnorm import reference
from actbench.methods.actnn.ops.groupquant import reference as groups

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((2, 3, 4), (1, 1, 36), (3, 2, 52), (2, 5, 14, 14), (2, 3, 24, 40), (1, 2, 4, 8, 11))
SEED = torch.tensor(-0x1234_5678_9ABC_DEF)


def placed(tensor: torch.Tensor, device: torch.device, start: int) -> torch.Tensor:
    """Return a copy on a device, `start` elements behind an aligned address."""
    place = torch.empty(tensor.numel() + start, dtype=tensor.dtype, device=device)
    return place[start:].view(tensor.shape).copy_(tensor)


def arguments(
    shape: tuple[int, ...], dtype: torch.dtype, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the operator takes: most numbers are ordinary, some groups are huge, tiny or not finite."""
    generator = torch.Generator().manual_seed(bits)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    flat = x.view(-1)
    flat[1024:1280] *= torch.finfo(dtype).max / 8
    flat[1280:1536] *= torch.finfo(dtype).smallest_normal / 2
    flat[4000:4001] = torch.nan
    mean, invstd, weight = torch.randn(3, shape[1], generator=generator)
    codes, words = groups.encode(flat, bits, group_size, SEED, True)
    return dy, codes, words, bits, group_size, mean, invstd.abs(), weight


def same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether all bits are equal; all NaN are one."""
    kind = torch.int32 if expected.dtype == torch.float32 else torch.int16
    found = [torch.where(each.isnan(), torch.nan, each).view(kind) for each in (ours.cpu(), expected)]
    return torch.equal(*found)


@pytest.mark.sampled(fast=9, slow=20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "group_size"), [(1, 256), (2, 32), (3, 96), (4, 256), (5, 1024), (6, 256), (7, 96), (8, 256)]
)
@pytest.mark.parametrize("start", [0, 1])
def test_the_gradients_are_the_reference(
    bits: int, group_size: int, dtype: torch.dtype, start: int, device: torch.device
) -> None:
    for shape in SHAPES:
        dy, codes, words, *sizes, mean, invstd, weight = arguments(shape, dtype, bits, group_size)
        expected = reference.backward(dy, codes, words, *sizes, mean, invstd, weight)
        results = batchnorm.backward.__wrapped__(dy, codes, words, *sizes, mean, invstd, weight)
        ours = [placed(result, device, start) for result in results]

        there = [each.to(device) for each in (mean, invstd, weight)]
        batchnorm.launch(
            *ours, placed(dy, device, start), placed(codes, device, start), words.to(device), *sizes, *there
        )

        for name, one, other in zip(("dx", "weight", "bias", "sums"), ours, expected, strict=True):
            assert same(one, other), (shape, name)
        assert expected[0].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 70, 70)], ids=str)
def test_the_cpu_gives_what_the_reference_gives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for bits, group_size in ((1, 256), (3, 96), (8, 1024)):
        given = arguments(shape, dtype, bits, group_size)

        expected = reference.backward(*given)
        for one, other in zip(batchnorm.backward(*given), expected, strict=True):
            assert same(one, other), (bits, group_size)
        dy, codes, words, *sizes, mean, invstd, weight = given
        prepared = batchnorm.gradients(dy.shape, dtype, *sizes, dy.device)
        for one, other in zip(prepared(dy, codes, words, mean, invstd, weight), expected[:3], strict=True):
            assert same(one, other), (bits, group_size)


def test_with_many_bits_they_are_torchs(device: torch.device) -> None:
    x, dy = torch.randn(2, 4, 3, 16, 16)
    weight = torch.rand(3)
    _, mean, invstd = torch.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
    codes, words = groups.encode(x.view(-1), 8, 32, SEED, True)
    given = [each.to(device) for each in (dy, codes, words)]
    rest = [each.to(device) for each in (mean, invstd, weight)]
    results = [
        each.to(device) for each in batchnorm.backward.__wrapped__(dy, codes, words, 8, 32, mean, invstd, weight)
    ]

    batchnorm.launch(*results, *given, 8, 32, *rest)

    decoded = groups.decode(codes, words, 8, 32, 0, x.numel(), x.dtype).view(x.shape)
    wanted = [True] * 3
    exact = torch.ops.aten.native_batch_norm_backward(dy, decoded, weight, None, None, mean, invstd, True, 1e-5, wanted)
    for ours, theirs in zip(results[:3], exact, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.randn(2, 3, 8, 8).mT}, "contiguous"),
        ({0: torch.randn(6)}, "channels"),
        ({0: torch.randn(2, 3, 7, 7)}, "multiple of 4 elements"),
        ({3: 9}, "bits"),
        ({4: 100}, "multiple of 32"),
        ({1: torch.zeros(5, dtype=torch.uint8)}, "5 bytes of codes"),
        ({5: torch.zeros(4)}, "3 channels"),
        ({7: torch.zeros(3, dtype=torch.float64)}, "weight must be"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[int, object], message: str) -> None:
    given = dict(enumerate(arguments((2, 3, 8, 8), torch.float32, 2, 256))) | change

    with pytest.raises(ValueError, match=message):
        batchnorm.backward(*given.values())
