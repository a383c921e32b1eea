"""Statistics that operators save stay whole, and what they save beside them does not."""

import pytest
import torch
from torch import nn

from actbench.nn.hooked.hooks import Held
from actbench.nn.offloaded import StaysHere


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
    packs = [shape for shape, held in found if isinstance(held, Held)]
    left = [shape for shape, held in found if isinstance(held, StaysHere)]

    assert shapes[frozen] in left or (kind, frozen) == ("rms", True)
    assert packs
    assert {torch.Size(shape).numel() for shape in packs} == {128 * 16 * 8}  # the input, maybe seen otherwise


def test_a_large_batch_norm_keeps_its_statistics(hook, packed):
    model = hook(nn.Sequential(nn.Conv2d(3, 80, 1), nn.BatchNorm2d(80)))
    found = packed(model)
    model(torch.randn(4, 3, 8, 8))

    assert all(isinstance(held, StaysHere) for held in found.of(80))
    assert any(isinstance(held, Held) for held in found.of(4, 80, 8, 8))


def test_statistics_of_compressed_layers_inside_of_hooks_are_whole():
    """As in the attention blocks of LeViT, under ``actnn``."""
    from actbench import schemes
    from actbench.nn.hooked import HookedForward
    from actbench.training import TrainingSetup

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
    assert (((16, 128)), Held) in left  # what softmax saves
