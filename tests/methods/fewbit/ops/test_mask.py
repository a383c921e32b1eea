import pytest
import torch

from actbench.methods.fewbit.ops.mask import relu_reference, select_reference
from actbench.ops.library import DTYPES

ops = torch.ops.actbench
SIZES = (0, 1, 7, 8, 31, 32, 33, 255, 257, 2047, 2048, 2049, 5000)
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-42, -1e-42, 3.0, -3.0])


def bits(tensor):
    """Return the bits of a float tensor; all NaN are one."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), torch.nan, tensor).view(width)


def sample(size, dtype):
    x = torch.randn(size)
    x[: len(SPECIAL)] = SPECIAL[:size]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_is_torchs_and_the_bit_is_whether_its_gradient_passes(dtype):
    for size in SIZES:
        x = sample(size, dtype).requires_grad_()
        y, mask = ops.relu_mask(x.detach())
        grad = torch.randn(size).to(dtype)
        torch.relu(x).backward(grad)

        assert torch.equal(bits(y), bits(torch.relu(x.detach())))
        assert torch.equal(mask, relu_reference(x.detach())[1])
        assert torch.equal(bits(ops.mask_select(mask, grad)), bits(x.grad))


def test_the_mask_by_hand():
    _, mask = ops.relu_mask(torch.tensor([-1.0, 0.0, 2.0, torch.nan, -0.0, torch.inf, -torch.inf, 1e-45, 5.0]))
    assert mask.tolist() == [(1 << 2) + (1 << 3) + (1 << 5) + (1 << 7), 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_value(dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    y, mask = ops.relu_mask(x)
    expected, expected_mask = relu_reference(x)

    assert torch.equal(bits(y), bits(expected))
    assert torch.equal(mask, expected_mask)


def test_an_infinite_gradient_of_a_dead_unit_is_zero():
    _, mask = ops.relu_mask(torch.tensor([-1.0, 1.0]))
    grad = torch.tensor([torch.inf, torch.nan])
    for select in (ops.mask_select, select_reference):
        out = select(mask, grad)
        assert out[0] == 0
        assert out[1].isnan()
