import pytest
import torch

from actbench.ops import bitpack

ops = torch.ops.actbench
SIZES = (0, 1, 7, 8, 255, 256, 257, 2047, 2049, 10_007)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_operators_equal_the_reference(bits):
    for size in SIZES:
        codes = torch.randint(2**bits, (size,), dtype=torch.uint8)
        packed = ops.pack_codes(codes, bits)

        assert packed.numel() == -(-size * bits // 8)
        assert torch.equal(packed, bitpack.pack(codes, bits))
        assert torch.equal(ops.unpack_codes(packed, bits, size), codes)
        assert torch.equal(bitpack.unpack(packed, bits, size), codes.long())


@pytest.mark.parametrize("bits", range(1, 8))
def test_bits_beyond_the_code_are_left_out(bits):
    codes = torch.arange(256).to(torch.uint8)
    assert torch.equal(ops.pack_codes(codes, bits), ops.pack_codes(codes % 2**bits, bits))
