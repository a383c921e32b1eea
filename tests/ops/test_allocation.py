"""Allocation without torch's dispatcher gives what ``torch.empty`` gives."""

from __future__ import annotations

import pytest
import torch

from actbench.ops.allocation import allocator


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (3, 1, 4, 2)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_tensors_have_the_form_of_empty_ones(device, shape, dtype):
    like = torch.empty(shape, dtype=dtype, device=device)

    made = allocator(like.shape, dtype, like.device)()

    assert (made.shape, made.stride(), made.dtype, made.device) == (like.shape, like.stride(), dtype, like.device)
    assert made.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    assert not made.requires_grad


def test_each_tensor_has_memory_of_its_own():
    new = allocator((4,), torch.float32, torch.device("cpu"))

    one, other = new().fill_(1), new().fill_(2)

    assert (one.tolist(), other.tolist()) == ([1] * 4, [2] * 4)
