"""Feature maps and gradient maps that are quantized as they flow."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actbench.errors import ConversionError
from actbench.methods.formats import encodings
from actbench.methods.formats.encoded import EncodedOutputs, quantized_modules, through
from actbench.methods.formats.encoded.form import Encoded
from actbench.packing import SavedTensors
from actbench.packing.hooked import HookedForward, Hooks
from actbench.packing.hooked.hooks import PackedAtSite

INT4 = encodings.build("int:4")  # to the nearest: no noise


def hook(model, forward=None, maps=None):
    for module in quantized_modules(model):
        module.register_forward_hook(EncodedOutputs(forward, maps))
    return model


def network():
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.0), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 64))


def test_outputs_are_what_the_format_leaves_of_them_and_the_gradient_goes_straight_through():
    exact = nn.Linear(64, 64)
    model, x, weight = hook(copy.deepcopy(exact), forward=INT4), torch.randn(8, 64), torch.randn(8, 64)
    y = model(x)
    (y * weight).sum().backward()
    (exact(x) * weight).sum().backward()

    assert torch.equal(y, through(exact(x), INT4))
    assert not torch.equal(y, exact(x))
    assert torch.equal(model.weight.grad, exact.weight.grad)


def test_gradient_maps_are_what_the_format_leaves_of_them_and_the_forward_pass_is_exact():
    exact = nn.Linear(64, 64)
    model, x, weight = hook(copy.deepcopy(exact), maps=INT4), torch.randn(8, 64), torch.randn(8, 64)
    y = model(x)
    (y * weight).sum().backward()

    assert torch.equal(y, exact(x))
    torch.testing.assert_close(model.weight.grad, through(weight, INT4).t() @ x)


@pytest.mark.parametrize("keys", [("forward",), ("maps",), ("forward", "maps")])
@pytest.mark.parametrize("training", [True, False])
def test_overwriting_layers_and_evaluation_work(keys, training):
    model = hook(network(), **dict.fromkeys(keys, INT4)).train(training)
    model(torch.randn(8, 64)).sum().backward()

    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_modules_that_only_move_elements_are_left():
    kinds = [type(module).__name__ for module in quantized_modules(network())]

    assert kinds == ["Linear", "ReLU", "Linear"]


def test_small_tensors_integers_and_inputs_that_come_back_stay():
    class Mixed(nn.Module):
        def forward(self, x):
            return x, x[:1, :8] * 2, torch.arange(100)

    given = torch.randn(8, 64)
    same, small, whole = hook(Mixed(), forward=INT4)(given)

    assert same is given
    assert torch.equal(small, given[:1, :8] * 2)
    assert torch.equal(whole, torch.arange(100))


def test_a_lossy_output_is_kept_as_the_codes_that_it_was_decoded_of():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    smaq = encodings.build("smaq")
    packer = SavedTensors(Encoded(smaq))
    hooks = Hooks(packer, 6.5, {})
    hook(model, forward=smaq)
    HookedForward(model, hooks).bind()
    found, pack = [], hooks.pack
    hooks.pack = lambda tensor: found.append((tensor, pack(tensor))) or found[-1][1]
    model(torch.randn(8, 64, requires_grad=True))

    packed = [(tensor, held) for tensor, held in found if isinstance(held, PackedAtSite)]
    assert packed
    for tensor, held in packed:  # a second rounding would change it
        assert torch.equal(held.packed.unpack(), tensor)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_maps_are_quantized_once(use_reentrant):
    model = hook(network(), maps=INT4)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 64, requires_grad=True)
    checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    plain(x).square().sum().backward()

    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_compiling_is_refused(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ConversionError, match="feature maps are quantized cannot be compiled"):
        hook(nn.Linear(64, 64), maps=INT4)(torch.randn(8, 64))
