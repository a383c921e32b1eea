"""What every encoding owes, over the registry: sizes, shapes, types, and that no NaN or infinity becomes a number."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.methods.formats.encodings import COMPARED, ENCODINGS, build, parts_bytes, snr_db
from actbench.methods.formats.ops.smaq import reference as smaqblocks
from actbench.ops.library import DTYPES
from actbench.ops.noise import fresh_seed

SEED = torch.tensor(7)
SPECS = (
    *COMPARED,
    "bf16,rounding=stochastic",
    "fp16,rounding=stochastic",
    "fp8:e4m3,rounding=stochastic,scale=bfloat16,group_size=64",
    "fp8:e5m2,scale=none",
    "s2fp8,rounding=stochastic",
    "int:3,rounding=stochastic",
    "nf4",
    "smaq_simulated,statistics=sample",
    "smaq_simulated,statistics=range,rounding=truncate",
    "nnwbdi,bits=4,choice=smallest",
)
RANDOM = ("smaq", "smaq_simulated", "smaq_simulated,clamp=true")
SHAPES = ((), (0,), (3, 0, 2), (1,), (7,), (64,), (5, 3, 43), (1025,))
BY_VALUE = ("bf16", "fp16", "fp8:e5m2,scale=none", "s2fp8")  # what is not finite stays what it is, and alone


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def through(encoding, x, dtype=None, seed=SEED):
    return encoding.decode(encoding.encode(x, seed.to(x.device)), x.shape, dtype or x.dtype)


def test_every_encoding_is_tried():
    assert {build(spec).name for spec in SPECS} == set(ENCODINGS)


@pytest.mark.sampled(fast=30, slow=20)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_types_and_closed_form_bytes(spec, dtype):
    encoding = build(spec)
    for shape in SHAPES:
        x = normal(*shape, dtype=dtype)
        before = x.clone()
        parts = encoding.encode(x, SEED)
        out = encoding.decode(parts, x.shape, dtype)

        assert torch.equal(x, before)
        assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, dtype, True)
        assert all(
            part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for part in parts if part.numel()
        )
        held, formula = parts_bytes(parts), encoding.packed_bytes(shape, dtype)
        assert held == formula if encoding.fixed_rate else held <= formula
        assert sum(part.untyped_storage().nbytes() for part in parts) == held


@pytest.mark.parametrize("spec", SPECS)
def test_strides_do_not_matter_and_graphs_end(spec):
    encoding = build(spec)
    x = normal(6, 40, 11)
    for view in (x.transpose(0, 2), x[::2, 1:, ::3], x.to(memory_format=torch.contiguous_format)[:, ::2]):
        assert torch.equal(through(encoding, view), through(encoding, view.contiguous()))
    parts = encoding.encode(x.requires_grad_(), SEED)
    assert not any(part.requires_grad for part in parts)


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_seed_gives_the_same_bytes(spec):
    encoding, x = build(spec), normal(1000)
    first, again = encoding.encode(x, SEED), encoding.encode(x, SEED)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, again, strict=True))

    other = encoding.encode(x, torch.tensor(8))
    if spec in RANDOM or "stochastic" in spec or "sample" in spec:
        assert any(
            a.shape != b.shape or not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(first, other, strict=True)
        )


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("what", "dtype"),
    [(torch.nan, torch.float32), (-torch.inf, torch.float16), (torch.inf, torch.bfloat16)],
)
def test_what_is_not_finite_never_becomes_a_number(spec, what, dtype):
    encoding = build(spec)
    x = normal(2048, dtype=dtype)
    x[5] = what
    out = through(encoding, x)

    assert not out[5].isfinite()
    if spec.startswith(BY_VALUE):
        assert out[5].isnan() if what != what else out[5] == what
        assert out[torch.arange(2048) != 5].isfinite().all()
    elif spec.startswith(("int", "fp8", "smaq")) and build(spec).stored:
        assert out[:32].isnan().all()
        assert out[1024:].isfinite().all()
    elif "sample" not in spec:
        assert out.isnan().all()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("smaq")])
def test_zeros_behind_a_relu_stay_zeros(spec):
    encoding = build(spec)
    x = normal(3000).relu()

    assert (through(encoding, x)[x == 0] == 0).all()
    assert torch.equal(through(encoding, torch.zeros(100)), torch.zeros(100))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "scale=none" not in spec and not spec.startswith("fp16")])
@pytest.mark.parametrize("value", [3e38, -2.5, 1e-44])
def test_constant_tensors_come_back(spec, value):
    x = torch.full((300,), value)
    out = through(build(spec), x)
    if spec.startswith("smaq,") or spec == "smaq":
        out = out.where(x.abs() < smaqblocks.HUGE, x)  # from there on blocks are NaN, as the operator says

    # The coarsest are e4m3 beside a scale that is rounded up, and bfloat16, whose least step is 2**-133.
    share = 2**-3 if "scale=bfloat16" in spec else 2**-7
    assert ((out.double() - x.double()).abs() <= x.double().abs() * share + 2.0**-133).all()


@pytest.mark.sampled(fast=20, slow=20)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("nnwbdi")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_tensors_tell_the_bytes(spec, dtype):
    encoding = build(spec)
    with FakeTensorMode():
        x, seed = torch.empty(5, 300, dtype=dtype), fresh_seed(torch.empty(0))
        parts = encoding.encode(x, seed)
        out = encoding.decode(parts, x.shape, dtype)

    real = encoding.encode(normal(5, 300, dtype=dtype), SEED)
    assert [(part.shape, part.dtype) for part in parts] == [(part.shape, part.dtype) for part in real]
    assert (out.shape, out.dtype) == (x.shape, dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_other_types_are_refused(spec):
    with pytest.raises(ValueError, match=r"found torch\.int32"):
        build(spec).encode(torch.zeros(8, dtype=torch.int32), SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith(("nnwbdi", "s2fp8", "smaq_simulated"))])
def test_bytes_on_cuda_are_those_on_the_cpu(spec):
    # S2FP8 and the simulation go through logarithms, powers and sums, whose last bits differ between devices.
    encoding, x = build(spec), normal(5003)
    here, there = encoding.encode(x, SEED), encoding.encode(x.cuda(), SEED.cuda())

    assert all(torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in zip(here, there, strict=True))
    assert torch.equal(encoding.decode(there, x.shape, x.dtype).cpu(), encoding.decode(here, x.shape, x.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.startswith(("s2fp8", "smaq_simulated"))])
def test_what_goes_through_logarithms_and_sums_is_as_good_on_cuda(spec):
    encoding, x = build(spec), normal(2**16)
    decibels = [snr_db(x, through(encoding, x.to(device)).cpu()) for device in ("cpu", "cuda")]

    assert decibels[0] == pytest.approx(decibels[1], abs=0.05)
