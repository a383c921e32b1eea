"""Saved tensors in number formats: their bytes, who shares them, and what is left as it is."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

from actbench.methods.actnn.layers.layers import small_codes
from actbench.methods.formats import encodings
from actbench.methods.formats.encoded import Encoded
from actbench.packing import SavedTensors, SiteState, savedtensors
from actbench.packing.hooked import HookedForward, Hooks
from actbench.packing.hooked.hooks import PackedAtSite

BATCH, WIDTH = 8, 256
SMAQ_BLOCK = 8 + 256 * 6 // 8 + 64 // 8  # header, 6 bits each, 1 bit more for each of 64 outliers


def hooked(model, spec, masks=True):
    """Bind hooks, and return the list of what each saved tensor is made."""
    hooks = Hooks(SavedTensors(Encoded(encodings.build(spec))), 8, small_codes() if masks else {})
    HookedForward(model, hooks).bind()
    found, pack = [], hooks.pack

    def spy(tensor):
        found.append(pack(tensor))
        return found[-1]

    hooks.pack = spy
    return found


def parts(found):
    storages = {
        part.untyped_storage() for held in found if isinstance(held, PackedAtSite) for part in held.packed.parts
    }
    return sum(storage.nbytes() for storage in storages)


def network():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def step(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


TANH, RELU = BATCH * WIDTH, BATCH * WIDTH  # elements that tanh and the layer behind it share, and those of the ReLU


@pytest.mark.parametrize(
    ("spec", "each"),
    [
        ("smaq", SMAQ_BLOCK),
        ("int:6", 256 * 6 // 8 + 4 * 256 // 64),
        ("bf16", 2 * 256),
        ("fp8:e4m3", 256 + 4),
        ("fp8:e5m2,group_size=128", 256 + 4 * 2),
    ],
)
def test_a_tensor_takes_the_bytes_of_its_format_and_is_kept_once(spec, each):
    model = network()
    found = hooked(model, spec)
    model(torch.randn(BATCH, WIDTH))

    blocks = (TANH + RELU) // 256  # the mask of the ReLU is saved apart, as codes that are no floating point
    assert parts(found) == blocks * each


@pytest.mark.parametrize("spec", ["smaq", "int:6", "bf16", "fp8:e4m3", "s2fp8", "smaq_simulated"])
def test_gradients_are_near_the_exact_ones_and_the_output_is_exact(spec):
    exact = network()
    model, x = copy.deepcopy(exact), torch.randn(BATCH, WIDTH)
    hooked(model, spec)

    assert torch.equal(model(x), exact(x))
    for found, wanted in zip(step(model, x), step(exact, x), strict=True):
        assert (found - wanted).norm() <= 0.08 * wanted.norm()


def test_a_relu_keeps_its_mask_and_not_its_output():
    exact = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model, x = copy.deepcopy(exact), torch.randn(BATCH, WIDTH)
    found = hooked(model, "smaq")
    gradients = step(model, x)

    masks = [held.tensor for held in found if not isinstance(held, PackedAtSite) and held.tensor.dtype == torch.uint8]
    assert parts(found) == 0
    assert sum(mask.nbytes for mask in masks) == RELU // 8
    assert all(torch.equal(a, b) for a, b in zip(gradients, step(exact, x), strict=True))


@pytest.mark.parametrize("spec", ["smaq", "smaq,rounding=nearest", "smaq_simulated", "int:6"])
def test_small_probabilities_below_zero_by_their_code_do_no_harm(spec):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.log_softmax(8 * self.layer(x), -1)

    exact, x = Classifier(), torch.randn(BATCH, WIDTH)
    model = copy.deepcopy(exact)
    hooked(model, spec)
    exact(x)[:, :4].sum().backward()
    loss = model(x)[:, :4].sum()
    loss.backward(retain_graph=True)
    found, wanted = model.layer.weight.grad.clone(), exact.layer.weight.grad
    loss.backward()

    torch.testing.assert_close(model.layer.weight.grad, 2 * found)
    assert (found - wanted).norm() <= 0.1 * wanted.norm()


def test_what_is_no_larger_stays_as_it_is():
    packer = SavedTensors(Encoded(encodings.build("bf16")))
    x = torch.randn(4, 256, dtype=torch.bfloat16)

    assert packer.why_not(x) == "no larger than in bf16"
    assert packer.pack(x, SiteState("", 16)).parts == (x,)
    assert packer.why_not(x.float()) is None
    assert packer.why_not(x > 0) is None
    assert packer.why_not(torch.arange(256)) is not None
    assert packer.why_not(nn.Parameter(x.float())) == "a parameter"


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_with_values_that_are_not_finite_stays_whole_where_it_is_looked_at(value, dtype):
    packer = SavedTensors(Encoded(encodings.build("smaq")))
    masked = torch.randn(4, 256).masked_fill(torch.eye(4, 256) > 0, value).to(dtype)

    assert packer.pack(masked, SiteState("", 8, guarded=True)).parts == (masked,)
    assert isinstance(packer.pack(masked, SiteState("", 8)).codec, Encoded)
    assert isinstance(packer.pack(torch.randn(4, 256), SiteState("", 8, guarded=True)).codec, Encoded)


STORED = ("smaq", "bf16", "fp16", "fp8:e4m3", "fp8:e5m2", "fp8:e4m3,scale=none", "s2fp8", "int:6")


def kept_with(value, spec, dtype):
    """Return a tensor with such a value in it, what is kept of it where it is looked at, and why it was left."""
    x = torch.randn(4, 256, dtype=dtype)
    x[1, 2] = value
    with savedtensors.observing():
        packed = SavedTensors(Encoded(encodings.build(spec))).pack(x, SiteState("", 8, guarded=True))
    return x, packed, savedtensors.reason_for(x.untyped_storage())


@pytest.mark.parametrize("spec", [*STORED, "smaq_simulated", "smaq_simulated,statistics=sample"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_value_that_comes_back_finite_is_packed(spec, dtype, sign):
    encoding = encodings.build(spec)
    if encoding.stored and encoding.packed_bytes((1024,), dtype) >= 1024 * dtype.itemsize:
        return  # it would not be kept in this format
    _, packed, reason = kept_with(sign * encoding.largest(dtype), spec, dtype)

    assert isinstance(packed.codec, Encoded)
    assert packed.unpack().isfinite().all()
    assert reason is None


@pytest.mark.parametrize(
    ("spec", "dtype", "value"),
    [
        ("smaq", torch.float32, torch.finfo(torch.float32).min),
        ("smaq", torch.float32, 3e38),
        ("smaq", torch.bfloat16, torch.finfo(torch.bfloat16).min),
        ("bf16", torch.float32, torch.finfo(torch.float32).min),
        ("bf16,rounding=stochastic", torch.float32, 3.392e38),
        ("fp16", torch.float32, 65520),
        ("fp16", torch.float32, -1e6),
        ("fp16,rounding=stochastic", torch.float32, 65505),
        ("smaq_simulated", torch.float32, 3e38),
        *((spec, torch.float64, -1e100) for spec in STORED),
    ],
)
def test_a_tensor_with_a_finite_value_that_the_format_would_lose_stays_whole_and_says_why(spec, dtype, value):
    x, packed, reason = kept_with(value, spec, dtype)

    assert packed.parts == (x,)
    assert (
        reason
        == f"values beyond {encodings.build(spec).largest(dtype):.5g}, which {spec} may unpack as infinite or NaN"
    )


@pytest.mark.parametrize("spec", STORED)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_a_reason_of_its_own(spec, value):
    x, packed, reason = kept_with(value, spec, torch.float32)

    assert packed.parts == (x,)
    assert reason == "values that are not finite"


@pytest.mark.parametrize("spec", STORED)
def test_ordinary_masks_are_packed(spec):
    _, packed, _ = kept_with(-1e4, spec, torch.float32)

    assert isinstance(packed.codec, Encoded)


@pytest.mark.parametrize("spec", ["smaq", "bf16", "fp16"])
def test_gradients_behind_a_mask_of_the_lowest_number_are_finite(spec):
    class Masked(nn.Linear):
        def forward(self, x):
            scores = super().forward(x).masked_fill(torch.eye(BATCH, WIDTH) > 0, torch.finfo(torch.float32).min)
            return scores.logsumexp(-1)

    exact, x = Masked(WIDTH, WIDTH), torch.randn(BATCH, WIDTH)
    model = copy.deepcopy(exact)
    hooked(model, spec)

    for found, wanted in zip(step(model, x), step(exact, x), strict=True):
        assert (found - wanted).norm() <= 0.05 * wanted.norm()


def test_memory_order_survives():
    x = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    packed = SavedTensors(Encoded(encodings.build("int:8"))).pack(x, SiteState("", 8))
    restored = packed.unpack()

    assert isinstance(packed.codec, Encoded)
    assert restored.stride() == x.stride()
    torch.testing.assert_close(restored, x, atol=0.02, rtol=0)


def test_a_copy_knows_no_tensor_and_keeps_the_format():
    packer, x = SavedTensors(Encoded(encodings.build("smaq"))), torch.randn(1024)
    packed = packer.pack(x, SiteState("", 8))
    twin = copy.deepcopy(packer)

    assert packer.pack(x, SiteState("", 8)).parts[0].data_ptr() == packed.parts[0].data_ptr()
    assert twin.codec == packer.codec
    assert twin.pack(x, SiteState("", 8)).parts[0].data_ptr() != packed.parts[0].data_ptr()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_after_a_step_or_an_exception(fails):
    class Broken(nn.Module):
        def forward(self, x):
            if fails:
                raise ArithmeticError
            return x

    model = nn.Sequential(network(), Broken())
    found = hooked(model, "smaq")
    x = torch.randn(BATCH, WIDTH)
    if fails:
        with pytest.raises(ArithmeticError):
            model(x)
    else:
        model(x).sum().backward()
    alive = [weakref.ref(part) for held in found if isinstance(held, PackedAtSite) for part in held.packed.parts]
    found.clear()
    gc.collect()

    assert alive
    assert not any(reference() for reference in alive)
