"""Statistics that operators save stay whole, and what they save beside them does not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actbench.packing.codecs import Repeated
from actbench.packing.hooked.forward import StaysHere
from actbench.packing.hooked.hooks import PackedAtSite
from actbench.packing.layout import without_repeats


class Normed(nn.Module):
    def __init__(self, norm, frozen=False):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), norm
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        return self.norm(self.first(x).transpose(1, 2)).sum()


NORMS = {
    "layer": (lambda: nn.LayerNorm(8), (128, 16, 1), (128, 16, 1)),
    "group": (lambda: nn.GroupNorm(1, 16), (128, 1), (128, 1)),
    "batch": (lambda: nn.BatchNorm1d(16), (16,), (16,)),
    "instance": (lambda: nn.InstanceNorm1d(16, affine=True), (128 * 16,), (128 * 16,)),
    "rms": (lambda: nn.RMSNorm(8), (128, 16, 1), (8,)),  # of a frozen input no scale is saved
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_means_and_scales_of_norms_are_whole(hook, packed, kind, frozen):
    make, *shapes = NORMS[kind]
    model = hook(Normed(make(), frozen))
    found = packed(model)
    model(torch.randn(128, 8, 16)).backward()
    packs = [shape for shape, held in found if isinstance(held, PackedAtSite)]
    left = [shape for shape, held in found if isinstance(held, StaysHere)]

    assert shapes[frozen] in left or (kind, frozen) == ("rms", True)
    assert packs
    assert {torch.Size(shape).numel() for shape in packs} == {128 * 16 * 8}  # the input, maybe seen otherwise


def test_a_large_batch_norm_keeps_its_statistics(hook, packed):
    model = hook(nn.Sequential(nn.Conv2d(3, 80, 1), nn.BatchNorm2d(80)))
    found = packed(model)
    model(torch.randn(4, 3, 8, 8))

    assert all(isinstance(held, StaysHere) for held in found.of(80))
    assert any(isinstance(held, PackedAtSite) for held in found.of(4, 80, 8, 8))


def test_statistics_of_compressed_layers_inside_of_hooks_are_whole():
    """As in the attention blocks of LeViT, under ``actnn``."""
    from actbench import scheme as schemes
    from actbench.packing.hooked import HookedForward
    from actbench.scheme.setup import TrainingSetup

    class SomeAttention(nn.Sequential):
        pass

    model = nn.Sequential(SomeAttention(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GroupNorm(64, 128), nn.Softmax(1)))
    schemes.build("actnn").apply(TrainingSetup(model))
    hooks, left = HookedForward.of(model[0]).hooks, []
    pack = hooks.pack
    hooks.pack = lambda tensor: left.append((tuple(tensor.shape), type(held := pack(tensor)))) or held
    model(torch.randn(16, 64)).sum().backward()

    assert (128,) in dict(left)  # the batch norm's
    assert (16, 64) in dict(left)  # the group norm's
    assert {kind for shape, kind in left if shape in ((128,), (16, 64))} == {StaysHere}
    assert (((16, 128)), PackedAtSite) in left  # what softmax saves


class Written(nn.Module):
    """A norm written out, behind a layer."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), norm

    def forward(self, x):
        return self.norm(self.first(x))


def centred(x, dims):
    away = x - x.mean(dims, keepdim=True)
    return away / torch.sqrt(away.square().mean(dims, keepdim=True) + 1e-5)


WRITTEN = {  # and how many numbers the statistic has, of so many rows
    "root mean square": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), lambda rows: rows * 16),
    "with a cast": (lambda x: x * x.square().mean(-1, keepdim=True).rsqrt().bfloat16(), lambda rows: rows * 16),
    "layer": (lambda x: centred(x, -1), lambda rows: rows * 16),
    "channels first": (lambda x: centred(x, 1), lambda rows: rows * 64),
    "batch": (lambda x: centred(x, (0, 1)), lambda rows: 64),
    "without its dimension": (lambda x: x / (x.norm(dim=(0, 1)) + 1e-6), lambda rows: 64),
    "of torch, expanded": (lambda x: F.normalize(x, dim=-1), lambda rows: rows * 16),
    "by its deviation": (
        lambda x: x / torch.var_mean(x, -1, keepdim=True)[0].clamp(1e-6).sqrt(), lambda rows: rows * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("kind", WRITTEN)
def test_statistics_of_norms_that_are_written_out_are_whole(hook, packed, kind, rows):
    norm, numbers = WRITTEN[kind]
    model = hook(Written(norm))
    found = packed(model)
    model(torch.randn(rows, 16, 64)).sum().backward()
    tensors = [held.packed for _, held in found if isinstance(held, PackedAtSite)]
    left = [without_repeats(held.tensor).numel() for _, held in found if isinstance(held, StaysHere)]

    assert numbers(rows) in left
    assert {each.layout.elements for each in tensors} == {rows * 16 * 64}
    assert not any(isinstance(each.codec, Repeated) for each in tensors)


def test_activations_with_a_dimension_of_one_are_packed(hook, packed):
    """As of a batch of one, of a pooled picture's gate behind a layer, or of a view that is to be repeated."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 512), nn.Linear(512, 512)

        def forward(self, x):
            x = self.first(x)
            scale = x.square().mean(-1, keepdim=True).rsqrt()
            return ((scale * x).tanh() * self.second(x)[:, None].sigmoid().unsqueeze(-1)[..., 0]).sum()

    model = hook(Gate())
    found = packed(model)
    model(torch.randn(1, 64))
    packed = {shape for shape, held in found if isinstance(held, PackedAtSite)}

    assert packed >= {(1, 512), (1, 1, 512)}


def test_statistics_of_a_function_of_ones_own_are_whole(hook, packed):
    """As torch's ``SyncBatchNorm`` saves a mean and a deviation for each channel, where no rule sees it."""

    class Synchronized(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            mean, invstd = x.mean(0), x.var(0).rsqrt()
            ctx.save_for_backward(x, mean, invstd)
            return (x - mean) * invstd

        @staticmethod
        def backward(ctx, grad):
            x, mean, invstd = ctx.saved_tensors
            normal = (x - mean) * invstd
            return invstd * (grad - grad.mean(0) - normal * (grad * normal).mean(0))

    class Norm(nn.Module):
        def forward(self, x):
            return Synchronized.apply(x)

    model = hook(nn.Sequential(nn.Linear(64, 128), Norm()))
    found = packed(model)
    model(torch.randn(256, 64)).sum().backward()

    assert [type(held) for held in found.of(128)] == [StaysHere] * 2
    assert [type(held) for held in found.of(256, 128)] == [PackedAtSite]
