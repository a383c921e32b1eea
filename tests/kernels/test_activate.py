"""kernels/activate.cu: codes bit for bit the reference's; outputs torch's own on CUDA, near the formula on the host.

The host's C library has other last bits in erf, tanh and exp than CUDA's, and compiles the formulas without fusing.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from actbench.methods.fewbit.ops import activate, stepwise

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 8, 255, 256, 257, 10007)
ULPS = 4  # of float32 at 1, in the factor of x: what 1 + erf, 1 + tanh and 1 + exp may be off
FORMULAS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def placed(tensor: torch.Tensor, device: torch.device, start: int) -> torch.Tensor:
    """Return a copy on a device, `start` elements behind an aligned address."""
    return torch.empty(tensor.numel() + start, dtype=tensor.dtype, device=device)[start:].copy_(tensor)


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    x = 3 * torch.randn(count, generator=torch.Generator().manual_seed(count))
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, 90.0, -90.0])
    x[: len(special)] = special[:count]
    return x.to(dtype)


def near(out: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> bool:
    """Tell whether outputs are the formula's, up to float32's rounding within and the output's own at the end."""
    size = x.double().abs().nan_to_num(0.0, 0.0, 0.0)
    slack = ULPS * 2.0**-24 * size + torch.finfo(out.dtype).eps * expected.abs().nan_to_num(0.0, 0.0, 0.0)
    slack = slack + torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    found = out.double()
    close = ((found - expected).abs() <= slack) | (found == expected) | (found.isnan() & expected.isnan())
    return bool(close.all())


def launched(x: torch.Tensor, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the launch writes to the results that the operator allocates."""
    made = activate.activate.__wrapped__(x, *arguments)
    activate.launch(*made, x, *arguments)
    return made


QUICK = {("gelu", torch.float32, 1), *((function, dtype, 3) for function in activate.FUNCTIONS for dtype in DTYPES)}


@pytest.mark.parametrize(
    ("function", "dtype", "bits"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in product(activate.FUNCTIONS, DTYPES, range(1, 9))
    ],
    ids=str,
)
def test_output_and_codes(function: str, dtype: torch.dtype, bits: int, device: torch.device) -> None:
    bounds = torch.randn(2**bits - 1, generator=torch.Generator().manual_seed(bits)).sort().values
    for count, start, fold in ((count, count % 2, count % 3 == 0) for count in SIZES):
        x = values(count, dtype)
        out, packed = launched(placed(x, device, start), function, bounds.to(device), bits, fold)

        assert torch.equal(packed.cpu(), stepwise.encode_reference(x, bounds, bits, fold)), count
        assert near(out.cpu(), FORMULAS[function](x.double()), x), count


@pytest.mark.gpu
@pytest.mark.parametrize("function", activate.FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_outputs_bits_are_torchs_on_the_device(function: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = activate.samples(dtype).to(device)

    out, _ = launched(x, function, torch.zeros(1, device=device), 1, False)

    expected = activate.FUNCTIONS[function](x)
    differs = ~((out == expected) | (out.isnan() & expected.isnan()))
    assert not differs.any(), (x[differs][:8], out[differs][:8], expected[differs][:8])
    assert activate.agrees_on_cuda(function, dtype, device)


def test_a_device_that_disagrees_is_served_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    activate.agrees_on_cuda.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    off = lambda out, packed, x, function, *_: out.copy_(activate.FUNCTIONS[function](x) * 1.5)  # noqa: E731
    monkeypatch.setattr(activate, "launch", off)
    assert not activate.agrees_on_cuda("gelu", torch.float16, torch.device("cpu"))

    activate.agrees_on_cuda.cache_clear()
    same = lambda out, packed, x, function, *_: out.copy_(activate.FUNCTIONS[function](x))  # noqa: E731
    monkeypatch.setattr(activate, "launch", same)
    assert activate.agrees_on_cuda("gelu", torch.float16, torch.device("cpu"))
    activate.agrees_on_cuda.cache_clear()


def test_samples_have_every_exponent_and_sign() -> None:
    words = activate.samples(torch.float32).view(torch.int32)

    assert len(((words >> 23) & 0x1FF).unique()) == 512
    assert len(activate.samples(torch.bfloat16)) == 2**16
