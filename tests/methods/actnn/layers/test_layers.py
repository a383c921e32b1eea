"""What every layer that packs its input computes."""

import pickle

import pytest
import torch
from torch import nn

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import compressed
from actbench.packing import Identity, SavedTensors, SiteState

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
TRIALS = 200


@pytest.mark.parametrize(
    ("dtype", "channels_last"),
    [(torch.float32, False), (torch.float32, True), (torch.float64, False), (torch.bfloat16, False)],
)
def test_with_the_input_as_it_is_everything_is_torchs_bit_for_bit(kind, dtype, channels_last, pair, results):
    exact, layer, x = pair(kind, SavedTensors(Identity()))
    exact, layer, x = exact.to(dtype), layer.to(dtype), x.to(dtype)
    if channels_last:
        if x.dim() not in FORMATS:
            return
        x = x.to(memory_format=FORMATS[x.dim()])
    expected, found = results(exact, x), results(layer, x)

    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert all(torch.equal(*each) for each in zip(layer.buffers(), exact.buffers(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_followed(kind, dtype, pair, results):
    exact, layer, x = pair(kind, SavedTensors(GroupQuantization(32)), bits=8)
    with torch.autocast("cpu", dtype):
        expected = results(exact, x)
        found = results(layer, x)  # backward inside of autocast
        untouched = [p.grad_fn for p in layer.parameters()]

    assert torch.equal(found[0], expected[0])
    assert found[0].dtype == expected[0].dtype
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.03 * other.norm()
    assert untouched == [None] * len(untouched)


@pytest.mark.parametrize("channels_last", [False, True])
def test_eight_bits_are_near_and_forward_is_exact(kind, channels_last, pair, results):
    exact, layer, x = pair(kind, SavedTensors(GroupQuantization(32)), bits=8)
    if channels_last and x.dim() in FORMATS:
        x = x.to(memory_format=FORMATS[x.dim()])
    expected, found = results(exact, x), results(layer, x)

    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert (one - other).norm() < 0.02 * other.norm()
        assert one.stride() == other.stride()
    assert all(torch.equal(*each) for each in zip(layer.buffers(), exact.buffers(), strict=True))


@pytest.mark.parametrize(("chunk", "channels_last"), [(3, True), (100, False)])
def test_pieces_of_the_batch_give_what_the_whole_gives(kind, chunk, channels_last, pair, results):
    found = []
    for pieces in (1, chunk):
        _, layer, x = pair(kind, SavedTensors(GroupQuantization(32)), chunk=pieces)
        if channels_last and x.dim() in FORMATS:
            x = x.to(memory_format=FORMATS[x.dim()])
        torch.manual_seed(1)
        found.append(results(layer.double(), x.double()))

    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        assert one.stride() == other.stride()


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    "kind",
    ["conv2d", "layernorm", *(pytest.param(k, marks=pytest.mark.slow) for k in ("linear", "batchnorm2d", "groupnorm"))],
)
def test_the_weight_gradient_is_unbiased_at_two_bits(kind, pair, results):
    exact, layer, x = pair(kind, SavedTensors(GroupQuantization(32)))
    truth = results(exact, x)[2]
    found = []
    for _ in range(TRIALS):
        layer.zero_grad()
        found.append((results(layer, x)[2] * truth).sum() / truth.square().sum())
    found = torch.stack(found)
    error = found.std() / TRIALS**0.5

    assert error < 0.02
    assert abs(found.mean() - 1) < 4 * error


def test_identity_is_kept(kind, pair):
    exact, _, x = pair(kind, SavedTensors(GroupQuantization()))
    exact.note, called = "mine", []
    exact.register_forward_hook(lambda module, *_: called.append(module))
    keys = list(exact.state_dict())
    layer = compressed(exact, SavedTensors(GroupQuantization()), SiteState(kind, 2))
    layer(x)

    assert isinstance(layer, type(exact))
    assert all(one is other for one, other in zip(layer.parameters(), exact.parameters(), strict=True))
    assert list(layer.state_dict()) == keys
    assert (layer.note, layer.training, called) == ("mine", exact.training, [layer])
    assert "2 bits" in repr(layer) or kind == "transformers"


@pytest.mark.parametrize("kind", ["conv2d", "transposed1d", "linear", "sync", "layernorm", "groupnorm"])
def test_a_pickled_layer_is_the_same_layer(kind, pair):
    _, layer, x = pair(kind, SavedTensors(GroupQuantization(64)), chunk=3)
    twin = pickle.loads(pickle.dumps(layer))

    assert torch.equal(twin(x), layer(x))
    assert (twin.packer.codec.group_size, twin.site.chunk, twin.site.path) == (64, 3, kind)


def test_other_classes_have_no_compressed_form():
    class Adapted(nn.Linear):
        pass

    assert compressed(Adapted(6, 4), SavedTensors(GroupQuantization()), SiteState("", 2)) is None
    assert compressed(nn.InstanceNorm2d(4), SavedTensors(GroupQuantization()), SiteState("", 2)) is None


@pytest.mark.parametrize("kind", ["conv2d", "linear", "layernorm", "evaluated"])
def test_an_empty_batch_is_torchs(kind, pair, results):
    exact, layer, x = pair(kind, SavedTensors(GroupQuantization(32)))
    for one, other in zip(results(layer, x[:0]), results(exact, x[:0]), strict=True):
        assert torch.equal(one, other)
