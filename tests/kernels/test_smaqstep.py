"""kernels/smaqstep.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actbench.methods.formats.ops import smaq, smaqstep
from actbench.methods.formats.ops.smaq.format import Format
from actbench.methods.formats.ops.smaqstep import rules as steprules
from actbench.ops import noise

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
USUAL = Format(6, 7, 64, 256)
CASES = (
    *((count, USUAL) for count in (0, 1, 7, 256, 257)),
    *((3001, form) for form in (USUAL, Format(6, 8, 64, 256), Format(3, 8, 5, 64), Format(6, 7, 0, 96))),
)
ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "maximize": False}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False, "maximize": False}
SEEDS = (-3, 2**63 - 5)
GUARD = 0xA5


def placed(tensor: torch.Tensor, device: torch.device, start: int) -> torch.Tensor:
    """Return a copy on a device, `start` elements behind an aligned address."""
    place = torch.empty(tensor.numel() + start, dtype=tensor.dtype, device=device)
    return place[start:].copy_(tensor)


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a normal sample whose parts are ordinary, zero, half zero, tiny, one for all, and not finite."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[300:600], x[700:900:2], x[1100:1300] = 0, 0, 0.125
    x[900:1100] *= torch.finfo(dtype).smallest_normal / 2
    x[2000:2001], x[2500:2501] = torch.inf, torch.nan
    return x


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point():
        one, other = (torch.where(x.isnan(), torch.nan, x) for x in (one, other))
    return torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def fixed_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference take the seeds that the launches here are given."""
    monkeypatch.setattr(smaqstep, "_seeds", lambda seed, first: SEEDS)


@pytest.mark.usefixtures("fixed_seeds")
@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.sampled(slow=2)) for dtype in DTYPES[1:])], ids=str
)
@pytest.mark.parametrize(("start", "betas"), [(0, (0.9, 0.999)), (1, (0.3, 0.9))])
def test_adam_is_the_reference(
    dtype: torch.dtype, start: int, betas: tuple[float, float], device: torch.device
) -> None:
    options = {**ADAM, "betas": betas, "decoupled": start == 0, "maximize": start == 1}
    for count, form in CASES:
        zeros = torch.zeros(form.packed_bytes(count), dtype=torch.uint8)
        expected = [values(count, dtype, 0), zeros.clone(), zeros.clone()]
        found = [placed(tensor, device, start) for tensor in expected]
        for step in (1, 2):
            rule, g = steprules.adam_rule(step, **options), values(count, dtype, step)
            p, means, roots = expected
            smaqstep.reference_adam_(p, g, means, roots, 0, rule, form)
            p, means, roots = found
            smaqstep.launch_adam(p, placed(g, device, start), means, roots, form, SEEDS, rule)
        assert all(same(*pair) for pair in zip(found, expected, strict=True)), (count, form)


@pytest.mark.usefixtures("fixed_seeds")
@pytest.mark.parametrize(("dtype", "start"), [(DTYPES[0], 0), (DTYPES[0], 1), *((dtype, 1) for dtype in DTYPES[1:])])
def test_sgd_is_the_reference(dtype: torch.dtype, start: int, device: torch.device) -> None:
    options = {**SGD, "nesterov": start == 1, "maximize": start == 1}
    for count, form in CASES:
        zeros = torch.zeros(form.packed_bytes(count), dtype=torch.uint8)
        expected = [values(count, dtype, 0), zeros.clone()]
        found = [placed(tensor, device, start) for tensor in expected]
        for step in (1, 2):
            rule, g = steprules.sgd_rule(step, **options), values(count, dtype, step)
            smaqstep.reference_sgd_(expected[0], g, expected[1], 0, rule, form)
            smaqstep.launch_sgd(found[0], placed(g, device, start), found[1], form, SEEDS[0], rule)
        assert all(same(*pair) for pair in zip(found, expected, strict=True)), (count, form)


@pytest.mark.parametrize("start", [0, 1])
def test_kernels_write_nothing_beyond_parameters_and_state(host_launch, start: int) -> None:
    rule = steprules.sgd_rule(1, **SGD)
    for count in (1, 257, 1100):
        size = USUAL.packed_bytes(count)
        p = torch.full((start + count + 64,), GUARD, dtype=torch.float16)
        state = torch.full((start + size + 64,), GUARD, dtype=torch.uint8)
        state[start : start + size] = 0
        flags = [np.uint32(v) if name == "nesterov" else np.float32(v) for name, v in rule._asdict().items()]
        sizes = np.int64(count), *smaq.sizes_of(USUAL)
        arguments = p[start:], values(count, torch.float16, 1), state[start:], *sizes, np.uint64(noise.mixed(1)), *flags
        host_launch("smaqstep", "smaqstep_sgd", smaq.macros_of(torch.float16, USUAL), 1024, *arguments)

        for buffer, last in ((p, start + count), (state, start + size)):
            assert (buffer[:start] == GUARD).all()
            assert (buffer[last:] == GUARD).all()
        assert (p[start : start + count] != GUARD).any()


@pytest.mark.gpu
def test_the_operator_reaches_the_kernels_beyond_two_to_the_31_elements() -> None:
    count, device, rule = 2**31 + 2**20 + 5, torch.device("cuda"), steprules.sgd_rule(1, **SGD)
    p = torch.zeros(count, dtype=torch.float16, device=device)
    g = torch.randn(2**20, device=device).half().repeat(count // 2**20 + 1)[:count]
    buffers = torch.zeros(USUAL.packed_bytes(count), dtype=torch.uint8, device=device)

    smaqstep.sgd_(p, g, buffers, 3, rule, USUAL)

    for start in (0, 2**31 - 2**12, 2**31 + 2**19):
        there = slice(start, start + 2**13)
        assert torch.equal(p[there], (g[there].float() * rule.rate).half())
