import pytest
import torch

from actbench.methods.fewbit.ops.stepwise import decode_reference, encode, encode_reference
from actbench.ops.library import DTYPES

ops = torch.ops.actbench
BOUNDS = torch.tensor([-1.0, 0.0, 2.0])
LEVELS = torch.tensor([0.25, 0.5, 0.75, 1.0])


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4), BOUNDS, 0, False), "bits must be from 1 to 8, found 0"),
        ((torch.ones(4), BOUNDS, 9, False), "bits must be from 1 to 8, found 9"),
        ((torch.ones(4), BOUNDS, 3, False), "3 bits take 7 bounds, found 3"),
        ((torch.ones(4), BOUNDS.double(), 2, False), "contiguous float32 vector"),
        ((torch.ones(4, dtype=torch.int32), BOUNDS, 2, False), "int32"),
    ],
)
def test_bad_arguments_are_refused_on_every_path(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.stepwise_encode(*arguments)
    with pytest.raises(ValueError, match=message):
        encode(*arguments)
    with pytest.raises(ValueError, match=message), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        ops.stepwise_encode(*arguments)


def test_packed_bytes_of_another_tensor_are_refused():
    with pytest.raises(ValueError, match="packed must have 2 bytes, found 1"):
        ops.stepwise_decode(torch.zeros(1, dtype=torch.uint8), LEVELS, torch.ones(5), 2)
