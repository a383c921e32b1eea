"""Codes between two bounds for all: as those of groups, but of one group."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant import reference
from actbench.ops import bitpack

SEED = torch.tensor(7)


def normal(count, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_one_group_has_the_codes_of_group_quantization(bits, dtype, stochastic):
    x = normal(1000, dtype)
    for ours, theirs in zip(
        groupquant.encode_in_one(x, bits, SEED, stochastic),
        groupquant.encode(x, bits, 1024, SEED, stochastic),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 255, 300])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_pieces_change_no_bytes_but_the_noise(bits, count, monkeypatch):
    x = normal(count)
    whole = groupquant.encode_in_one(x, bits, SEED, stochastic=False)
    monkeypatch.setattr(reference, "PIECE", 64)
    codes, meta = groupquant.encode_in_one(x, bits, SEED, stochastic=False)

    assert torch.equal(codes, whole[0])
    assert torch.equal(meta, whole[1])
    assert codes.nbytes == bitpack.packed_bytes(count, bits)
    back = groupquant.decode_in_one(codes, meta, bits, 0, count, torch.float32)
    for start, end in ((0, count), (count // 3, count), (count // 3, count // 2)):
        part = groupquant.decode_in_one(codes, meta, bits, start, end - start, torch.float32)
        assert torch.equal(part, back[start:end])


def test_pieces_have_noise_of_their_own(monkeypatch):
    monkeypatch.setattr(reference, "PIECE", 64)
    x = torch.cat([torch.zeros(1), torch.full((126,), 0.5), torch.ones(1)])
    codes, _ = groupquant.encode_in_one(x, 1, SEED)
    first, second = bitpack.unpack(codes, 1, 128).view(2, 64)

    assert not torch.equal(first[1:-1], second[1:-1])


def test_it_is_unbiased():
    x, runs = normal(500), 200
    total = torch.zeros(500, dtype=torch.float64)
    for seed in range(runs):
        codes, meta = groupquant.encode_in_one(x, 2, torch.tensor(seed))
        total += groupquant.decode_in_one(codes, meta, 2, 0, 500, torch.float64)
    step = float(groupquant.ranges(meta)) / 3
    place = ((x.double() - float(reference.bounds_of(meta)[0])) / step) % 1
    inner = (place > 0.05) & (place < 0.95)  # where a code is as good as certain there is no noise to compare with
    z = ((total / runs - x) / (step * (place * (1 - place) / runs).sqrt()))[inner]

    assert len(z) > 400
    assert abs(float(z.mean())) < 4 / len(z) ** 0.5
    assert float(z.square().mean()) < 1 + 4 * (2 / len(z)) ** 0.5


def test_fake_tensors_have_the_bytes_of_real_ones():
    with FakeTensorMode():
        codes, meta = groupquant.encode_in_one(torch.randn(1001), 3, torch.tensor(0))
        back = groupquant.decode_in_one(codes, meta, 3, 100, 10, torch.bfloat16)

    assert (codes.nbytes, meta.nbytes) == ((1001 * 3 + 7) // 8, 4)
    assert (back.shape, back.dtype) == ((10,), torch.bfloat16)
