import pytest
import torch

from actbench.methods.fewbit.ops import stepwise
from actbench.methods.fewbit.ops.stepwise import decode_reference, encode_reference
from actbench.ops import cpu

SIZES = (0, 1, 7, 8, 15, 16, 17, 31, 33, 255, 256, 257, 2047, 2049, 5000)
HALVES = (torch.float32, torch.float16, torch.bfloat16)


def tables(bits):
    generator = torch.Generator().manual_seed(bits)
    bounds = torch.randn(2**bits - 1, generator=generator).sort().values
    return bounds, torch.randn(2**bits, generator=generator)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", HALVES)
def test_bytes_and_products_equal_the_reference(dtype, bits, fold):
    bounds, levels = tables(bits)
    for size in SIZES:
        x, grad = torch.randn(2, size).to(dtype)
        packed = stepwise.encode(x, bounds, bits, fold)

        assert packed.numel() == -(-size * bits // 8)
        assert torch.equal(packed, encode_reference(x, bounds, bits, fold))
        assert torch.equal(stepwise.decode(packed, levels, grad, bits), decode_reference(packed, levels, grad, bits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fold", [False, True])
def test_every_half_value_is_encoded_as_by_the_reference(dtype, fold):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    near_zero = torch.tensor([-1e-3, -6e-5, -6e-8, -1e-20, 0.0, 3e-8, 6.1e-5])
    assert torch.equal(stepwise.encode(x, near_zero, 3, fold), encode_reference(x, near_zero, 3, fold))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", [1.0, 1.0009765625, 0.33333334, 2.0**-13, 2.0**-24, 1e-3, 3.1, -0.7, 0.0])
def test_every_half_gradient_is_rounded_as_by_the_reference(dtype, level):
    grad = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    packed = torch.zeros(grad.numel() // 8, dtype=torch.uint8)
    levels = torch.tensor([level, 0.0])
    ours, expected = stepwise.decode(packed, levels, grad, 1), decode_reference(packed, levels, grad, 1)

    assert torch.equal(ours.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(ours[finite].view(torch.int16), expected[finite].view(torch.int16))


def test_signs_of_zero_infinities_and_nan_survive():
    grad = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    out = stepwise.decode(torch.zeros(1, dtype=torch.uint8), torch.tensor([0.5, 1.0]), grad, 1)
    assert torch.equal(out[:4].view(torch.int32), grad[:4].view(torch.int32))
    assert out[4].isnan()


def test_several_python_threads_may_call_at_once():
    from concurrent.futures import ThreadPoolExecutor

    bounds, _ = tables(3)
    inputs = [torch.randn(50_000) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(lambda x: stepwise.encode(x, bounds, 3, False), inputs))
    for x, ours in zip(inputs, packed, strict=True):
        assert torch.equal(ours, encode_reference(x, bounds, 3, False))


def test_the_result_does_not_depend_on_the_number_of_threads():
    bounds, _ = tables(5)
    x = torch.randn(100_003)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = stepwise.encode(x, bounds, 5, False)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, stepwise.encode(x, bounds, 5, False))


def test_the_serial_kernels_are_the_same(monkeypatch):
    bounds, levels = tables(3)
    x = torch.randn(20_001)
    monkeypatch.setattr(cpu, "_pool", lambda: None)
    for name in ("_encode", "_decode"):
        monkeypatch.setattr(stepwise.cpu, name, cpu.kernel(getattr(stepwise.cpu, name).__wrapped__))
    packed = stepwise.encode(x, bounds, 3, False)

    assert torch.equal(packed, encode_reference(x, bounds, 3, False))
    assert torch.equal(stepwise.decode(packed, levels, x, 3), decode_reference(packed, levels, x, 3))
