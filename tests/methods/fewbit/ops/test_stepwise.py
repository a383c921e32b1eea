import pytest
import torch

from actbench.methods.fewbit.ops.stepwise import decode_reference, encode_reference
from actbench.ops.library import DTYPES

ops = torch.ops.actbench
BOUNDS = torch.tensor([-1.0, 0.0, 2.0])


def test_code_is_the_number_of_bounds_strictly_below():
    x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 1e-30, 2.0, 3.0, float("inf"), float("-inf"), float("nan")])
    codes = [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]
    expected = [sum(code << 2 * i for i, code in enumerate(codes[k : k + 4])) for k in (0, 4, 8)]
    for encoding in (encode_reference, ops.stepwise_encode):
        assert encoding(x, BOUNDS, 2, False).tolist() == expected


def test_fold_encodes_the_absolute_value():
    x = torch.randn(100)
    bounds = torch.tensor([0.3, 0.7, 1.1])
    for encoding in (encode_reference, ops.stepwise_encode):
        assert torch.equal(encoding(x, bounds, 2, True), encode_reference(x.abs(), bounds, 2, False))
    assert not torch.equal(encode_reference(x, bounds, 2, True), encode_reference(x, bounds, 2, False))


def test_three_bit_codes_straddle_bytes_little_endian():
    bounds = torch.arange(7.0) + 0.5
    codes = [5, 2, 7]
    stream = 5 | 2 << 3 | 7 << 6
    packed = encode_reference(torch.tensor(codes, dtype=torch.float32), bounds, 3, False)
    assert packed.tolist() == [stream & 255, stream >> 8]
    assert decode_reference(packed, torch.arange(8.0), torch.ones(3), 3).tolist() == codes


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_rounded_once(dtype):
    x = torch.randn(1000, dtype=torch.float64).to(dtype)
    grad = torch.randn(1000, dtype=torch.float64).to(dtype)
    levels = torch.tensor([0.1, 0.3, 1.1, 0.7])
    packed = ops.stepwise_encode(x, BOUNDS, 2, False)
    codes = (x.double()[:, None] > BOUNDS.double()).sum(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    assert torch.equal(ops.stepwise_decode(packed, levels, grad, 2), (grad.to(wide) * levels.to(wide)[codes]).to(dtype))


def test_float64_is_compared_in_float64():
    x = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    assert ops.stepwise_encode(x, torch.ones(1), 1, False).item() == 1
    assert ops.stepwise_encode(x.float(), torch.ones(1), 1, False).item() == 0
