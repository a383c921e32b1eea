"""kernels/mask.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

import pytest
import torch

from actbench.methods.fewbit.ops import mask
from actbench.ops import bitpack

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 8, 255, 256, 257, 10007)
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-42, -1e-42])


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    x[: len(SPECIAL)] = SPECIAL[:count]
    return x.to(dtype)


def placed(tensor: torch.Tensor, device: torch.device, start: int) -> torch.Tensor:
    """Return a copy on a device, `start` elements behind an aligned address."""
    return torch.empty(tensor.numel() + start, dtype=tensor.dtype, device=device)[start:].copy_(tensor)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Tell whether numbers are equal; zeros of either sign are, as CUDA's ReLU of -0.0 is not the CPU's."""
    return torch.equal(torch.nan_to_num(ours.cpu(), 7.0), torch.nan_to_num(theirs, 7.0)) and torch.equal(
        ours.cpu().isnan(), theirs.isnan()
    )


def bits_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(
        *(tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16) for tensor in (ours, theirs))
    )


def launched(operator, launch, *arguments):
    """Return what a launch writes to the results that an operator allocates."""
    made = operator.__wrapped__(*arguments)
    launch(*(made if isinstance(made, tuple) else (made,)), *arguments)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 1])
def test_relu_and_its_mask_are_the_reference(dtype: torch.dtype, start: int, device: torch.device) -> None:
    for count in SIZES:
        x = values(count, dtype)
        expected, bits = mask.relu_reference(x)
        there = placed(x, device, start)

        out, packed = launched(mask.relu, mask.launch_relu, there)
        assert same(out, expected), count
        assert torch.equal(packed.cpu(), bits), count
        assert same(out, torch.relu(there).cpu()), count
        assert bits_equal(out.cpu()[expected.isnan()], x[expected.isnan()]), count

        packed.zero_()
        mask.launch_relu(there, packed, there)
        assert same(there, expected), count
        assert torch.equal(packed.cpu(), bits), count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_value_passes_or_not_as_in_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    passes = mask.positive(x)

    out, packed = launched(mask.relu, mask.launch_relu, x.to(device))

    assert torch.equal(packed.cpu(), bitpack.pack(passes.to(torch.uint8), 1))
    assert bits_equal(out.cpu(), torch.where(passes, x, 0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 1])
def test_selection_is_the_reference(dtype: torch.dtype, start: int, device: torch.device) -> None:
    for count in SIZES:
        grad = values(count, dtype)
        bits = torch.randint(256, ((count + 7) // 8,), dtype=torch.uint8)

        found = launched(mask.select, mask.launch_select, placed(bits, device, start), placed(grad, device, start))
        assert bits_equal(found.cpu(), mask.select_reference(bits, grad)), count
