from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.methods.actnn.scheme import DEFAULTS, LEVELS
from actbench.scheme.setup import TrainingSetup
from actbench.units import GIB

WORD = 4 / 256  # bytes an element of what a group of 256 has beside its codes
IMAGE = 3 * 224 * 224
MODELS = ["resnet50", "resnet152"]

FIXED = {"bits": 4.0, "per_layer": False, "per_sample": False}  # adaptive_conv_scheme and adaptive_bn_scheme off
AUTHORS = {
    "L0": {"compress": False, "per_layer": False, "per_sample": False},
    "L1": FIXED | {"quantized_bn": False},
    "L2": FIXED,
    "L3": {},
    "L3.1": {"empty_cache_threshold": 0.2, "pipeline_threshold": 3 * GIB},
    "L4": {"swap": True},
    "L5": {"swap": True, "expandable_segments": True},
    "swap": {"swap": True, "compress": False},
}
UNCHANGED = {
    "compress": True,
    "bits": 2.0,
    "per_layer": True,
    "per_sample": True,
    "quantized_bn": True,
    "swap": False,
    "empty_cache_threshold": None,
    "pipeline_threshold": None,
    "expandable_segments": False,
}


def convert(model, text="actnn:L3"):
    return schemes.build(text).apply(TrainingSetup(model))


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))


@pytest.mark.parametrize("level", AUTHORS)
def test_a_level_sets_what_it_sets_in_the_authors_code_and_nothing_else(level):
    scheme = schemes.build(f"actnn:{level}")

    assert {key: scheme.setting(key) for key in DEFAULTS} == UNCHANGED | AUTHORS[level]


def test_there_are_the_levels_of_the_authors_code():
    assert set(LEVELS) == set(AUTHORS)
    assert schemes.build("actnn").level == "L3"
    with pytest.raises(SpecError, match=r"level=L4\.1 must be 'L0', 'L1'"):
        schemes.build("actnn:L4.1")


def test_a_key_goes_before_the_level_and_levels_do_not_add_up():
    assert schemes.build("actnn:L2,bits=8").setting("bits") == 8
    assert schemes.build("actnn:L4,swap=false").setting("swap") is False
    assert schemes.build("actnn:L1") != schemes.build("actnn:L3")
    assert schemes.build("actnn:L3").setting("bits") == 2


@pytest.mark.parametrize("text", ["actnn:L2,use_gradient=true", "actnn:L3,per_group=false", "actnn,bits=9"])
def test_what_does_not_go_together_is_refused(text):
    with pytest.raises(SpecError, match="actnn"):
        schemes.build(text)


def test_every_level_says_what_stands_at_each_place():
    becomes = {
        text: [site.becomes for site in convert(small(), text).sites] for text in ("actnn:L0", "actnn:L2,bits=8")
    }

    assert becomes["actnn:L0"] == ["input, whole", "input, whole", "an exact small code", "input, whole"]
    assert becomes["actnn:L2,bits=8"] == ["input, 8 bits", "input, 8 bits", "an exact small code", "input, 8 bits"]
    assert [site.was for site in convert(small(), "actnn:L1").sites] == ["nn.Conv2d", "nn.ReLU", "nn.Linear"]
    assert convert(small(), "actnn:L4").sites[0].becomes == "input, 2 bits in host memory"
    assert convert(small(), "actnn:L5").expandable_segments
    assert not convert(small(), "actnn:L4").expandable_segments


def test_a_norm_goes_with_the_layer_before_it_and_a_factor_is_a_quarter_of_the_fan_in():
    model = convert(small()).module
    places = CompressedForward.of(model).allocation.sites

    assert [place.path for place in places] == ["0", "4"]
    assert [place.factor for place in places] == [3 * 3 * 3 / 4, 8 * 6 * 6 / 4]
    assert [[follower.path for follower in place.followers] for place in places] == [["1"], []]


def test_an_input_of_several_layers_is_kept_once_unless_asked():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = x * 2  # what the model is called with is never packed
            return self.first(x) + self.second(x)

    packed = {}
    for share in ("true", "false"):
        storages = {}

        def note(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        model = convert(Two(), f"actnn:L2,share={share}").module
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.randn(16, 64, requires_grad=True)).sum()
        packed[share] = sorted(tensor.nbytes for tensor in storages.values() if not tensor.is_floating_point())

    codes, words = 16 * 64 * 4 // 8, 16 * 64 // 256 * 4
    assert packed == {"true": [words, codes], "false": [words, words, codes, codes]}


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConversionError, match=r"Sequential has no layer to convert; it holds .*Tanh"):
        convert(nn.Sequential(nn.Tanh()))


SLOW = pytest.mark.sampled(slow=1)


@pytest.mark.parametrize(("model", "megabytes"), [("resnet50", 85.31), pytest.param("resnet152", 176.83, marks=SLOW)])
def test_the_exact_model_keeps_what_the_closed_form_says(model, megabytes, read, count):
    elements, reading = count(model), read(model, "exact")
    distinct = sum(elements[kind] for kind in ("BatchNorm2d in", "ReLU out", "MaxPool2d out", "Linear in"))

    closed_form = distinct * 4 + elements["MaxPool2d out"] * 8
    assert closed_form == pytest.approx(megabytes * 1e6, rel=1e-4)
    assert reading.activation_bytes / 8 == pytest.approx(closed_form, rel=0.005)


PUBLISHED = {
    ("resnet50", 2): 7.19e6,
    ("resnet50", 4): 12.63e6,
    ("resnet152", 2): 14.69e6,
    ("resnet152", 4): 25.86e6,
}
"""Bytes of an image that the authors' layout takes: an image more than ours, and a byte for a place in a pool."""


@pytest.mark.parametrize(
    ("model", "bits"), [pytest.param(*key, marks=() if key == ("resnet50", 2) else SLOW) for key in PUBLISHED]
)
def test_each_layer_keeps_its_input_as_in_the_authors_layout(model, bits, read, count):
    elements, reading = count(model), read(model, f"actnn:L3,bits={bits},share=false")
    packed = sum(elements[kind] for kind in ("Conv2d in", "BatchNorm2d in", "Linear in")) - IMAGE
    places = elements["MaxPool2d out"]

    closed_form = packed * (bits / 8 + WORD) + elements["ReLU out"] / 8 + places * 4 / 8
    published = PUBLISHED[model, bits] - IMAGE * (bits / 8 + WORD) - places * (8 - 4) / 8
    assert published == pytest.approx(closed_form, rel=0.002)
    assert reading.activation_bytes / 8 == pytest.approx(closed_form, rel=0.02)


@pytest.mark.parametrize(("model", "most"), [("resnet50", 7.0e6), pytest.param("resnet152", 14.6e6, marks=SLOW)])
def test_at_two_bits_with_each_tensor_kept_once_an_image_takes_less(model, most, read):
    assert read(model, "actnn:L3").activation_bytes / 8 < most


@pytest.mark.slow
def test_a_step_of_resnet50_needs_less_than_a_fifth_of_the_memory(read):
    exact, ours = (read("resnet50", text, 128) for text in ("exact", "actnn:L3,chunk=4"))

    assert exact.peak_bytes / ours.peak_bytes > 5.5
    assert exact.activation_bytes / ours.activation_bytes > 12


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("actnn:L1,bits=2.5", r"level L1 allocates no bits.*write bits=2 or bits=3, or allocate bits by level L3"),
        ("actnn:L2,bits=7.5", r"level L2 allocates no bits.*write bits=7 or bits=8"),
        ("actnn:L3,per_layer=false,per_sample=false,bits=1.5", "level L3 allocates no bits"),
        ("actnn:L3,per_sample=false,per_group=false,bits=2.5", "needs per_group=true.*write bits=2 or bits=3"),
    ],
)
def test_fractions_of_a_bit_are_refused_where_nothing_is_shared_out(text, words):
    with pytest.raises(SpecError, match=words):
        schemes.build(text)
    assert schemes.build("actnn:L1,bits=2").setting("bits") == 2
    assert schemes.build("actnn:L2,bits=2.5,per_sample=true").setting("bits") == 2.5
