"""Saved tensors in number formats: their bytes, who shares them, and what is left as it is."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from actbench.codecs import encodings
from actbench.nn.compressed.small import small_codes
from actbench.nn.encoded import Encoded, EncodedKeeper
from actbench.nn.hooked import HookedForward, Hooks
from actbench.nn.hooked.hooks import Held
from actbench.nn.keeping import Place

BATCH, WIDTH = 8, 256
SMAQ_BLOCK = 8 + 256 * 6 // 8 + 64 // 8  # header, 6 bits each, 1 bit more for each of 64 outliers


def hooked(model, spec, masks=True):
    """Bind hooks, and return the list of what each saved tensor is made."""
    hooks = Hooks(EncodedKeeper(encodings.build(spec)), 8, small_codes() if masks else {})
    HookedForward(model, hooks).bind()
    found, pack = [], hooks.pack

    def spy(tensor):
        found.append(pack(tensor))
        return found[-1]

    hooks.pack = spy
    return found


def parts(found):
    storages = {part.untyped_storage() for held in found if isinstance(held, Held) for part in held.kept.parts}
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

    masks = [held.tensor for held in found if not isinstance(held, Held) and held.tensor.dtype == torch.uint8]
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
    keeper = EncodedKeeper(encodings.build("bf16"))
    x = torch.randn(4, 256, dtype=torch.bfloat16)

    assert keeper.why_not(x) == "no larger than in bf16"
    assert keeper.keep(x, Place("", 16)).parts == (x,)
    assert keeper.why_not(x.float()) is None
    assert keeper.why_not(x > 0) is None
    assert keeper.why_not(torch.arange(256)) is not None
    assert keeper.why_not(nn.Parameter(x.float())) == "a parameter"


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_with_values_that_are_not_finite_stays_whole_where_it_is_looked_at(value, dtype):
    keeper = EncodedKeeper(encodings.build("smaq"))
    masked = torch.randn(4, 256).masked_fill(torch.eye(4, 256) > 0, value).to(dtype)

    assert keeper.keep(masked, Place("", 8, guarded=True)).parts == (masked,)
    assert isinstance(keeper.keep(masked, Place("", 8)).form, Encoded)
    assert isinstance(keeper.keep(torch.randn(4, 256), Place("", 8, guarded=True)).form, Encoded)


def test_memory_order_survives():
    x = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    kept = EncodedKeeper(encodings.build("int:8")).keep(x, Place("", 8))
    restored = kept.form.restore(kept.parts)

    assert isinstance(kept.form, Encoded)
    assert restored.stride() == x.stride()
    torch.testing.assert_close(restored, x, atol=0.02, rtol=0)


def test_a_copy_knows_no_tensor_and_keeps_the_format():
    keeper, x = EncodedKeeper(encodings.build("smaq")), torch.randn(1024)
    kept = keeper.keep(x, Place("", 8))
    twin = copy.deepcopy(keeper)

    assert keeper.keep(x, Place("", 8)).parts[0].data_ptr() == kept.parts[0].data_ptr()
    assert twin.encoding == keeper.encoding
    assert twin.keep(x, Place("", 8)).parts[0].data_ptr() != kept.parts[0].data_ptr()


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
    alive = [weakref.ref(part) for held in found if isinstance(held, Held) for part in held.kept.parts]
    found.clear()
    gc.collect()

    assert alive
    assert not any(reference() for reference in alive)
