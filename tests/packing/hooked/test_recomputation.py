"""Blocks that are recomputed inside of a hooked model: packed in both runs, and as exact as the hooks alone."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import compressed
from actbench.methods.actnn.ops import groupquant
from actbench.methods.checkpointing.recomputed import RecomputedForward
from actbench.methods.gact.sensitivity import Probing
from actbench.packing import SavedTensors, SiteState
from actbench.packing.hooked import HookedForward


class Block(nn.Module):
    """Its first layer has no bias, whose gradient before a norm would be next to nothing, and only noise."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(64, 256, bias=False), nn.GELU(), nn.BatchNorm1d(256), nn.Linear(256, 64), nn.Dropout(0.5)
        )

    def forward(self, x, scale=None, shift=None):
        return x + self.inner(x) * (1 if scale is None else scale) + (0 if shift is None else shift[0])


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.first, self.blocks = nn.Linear(64, 64), nn.ModuleList(block() for _ in range(3))

    def forward(self, x, **options):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, **options)
        return x


def recompute(model):
    for number, block in enumerate(model.blocks):
        RecomputedForward(block, f"blocks.{number}").bind()
    return model


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch():
    return torch.randn(32, 64)


@pytest.mark.parametrize("probing", [None, Probing(8, 1)])
def test_gradients_masks_and_statistics_are_those_of_the_exact_model(hook, step, near, probing):
    exact = Model()
    model, x, found = recompute(hook(copy.deepcopy(exact), probing=probing)), batch(), []
    for each in (exact, model):
        torch.manual_seed(3)
        found = [[step(each, x) for _ in range(2)][-1], *found]

    assert near(*found)  # 8 bits in place of other dropout masks
    assert all(torch.equal(a, b) for a, b in zip(exact.buffers(), model.buffers(), strict=True))


def test_only_inputs_of_blocks_are_kept_and_packed(hook, packed):
    model = recompute(hook(Model(), bits=4, group_size=256))
    found = packed(model)
    loss = model(batch()).sum()
    parts = {part.untyped_storage() for _, held in found if hasattr(held, "packed") for part in held.packed.parts}

    assert [shape for shape, held in found if hasattr(held, "packed")] == [(32, 64)] * 3
    assert sum(storage.nbytes() for storage in parts) == 3 * groupquant.packed_bytes(32 * 64, 4, 256)
    del parts
    alive = found.alive()
    loss.backward()
    assert alive() == 0


def test_what_a_second_run_saves_is_packed_too(hook, packed):
    model = recompute(hook(Model(), bits=4))
    found = packed(model)
    loss = model(batch()).sum()
    found.clear()
    loss.backward()

    assert len(found.of(32, 256)) == 3 * 3  # the inputs of activation, norm and second layer
    for held in found.of(32, 256):
        assert (held.packed.bits, held.site.path.split(".")[0]) == (4, "blocks")
    del held
    assert found.alive()() == 0


def test_bits_of_each_block_are_its_own(hook):
    model = recompute(hook(Model(), bits=4, probing=Probing(4, 1)))
    model(batch()).sum().backward()
    model(batch()).sum().backward()
    paths = [site.path for site in HookedForward.of(model).hooks.sites]

    assert len(paths) == len(set(paths))
    assert {path.split()[0] for path in paths if path.startswith("blocks.")} == {f"blocks.{i}" for i in range(3)}


def test_arguments_by_name_in_any_nesting(hook):
    exact = without_dropout(Model())
    model, x, found = recompute(hook(copy.deepcopy(exact))), batch(), []
    scale, shift = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    for each in (exact, model):
        each.zero_grad()
        scale.grad = shift.grad = None
        each(x, scale=scale, shift=[shift, "unused"]).square().mean().backward()
        found.append([scale.grad, shift.grad, *(p.grad for p in each.parameters())])

    assert all((a - b).norm() <= 0.05 * a.norm() for a, b in zip(*found, strict=True))


class Nested(Block):
    """Gives its result as transformers' models do."""

    def forward(self, x):
        x = x["hidden"] if isinstance(x, dict) else x
        return OrderedDict(hidden=super().forward(x), nothing=None, parts=[x * 2])


def test_results_in_any_nesting(hook):
    class Outer(Model):
        def forward(self, x):
            found = super().forward(x)
            assert found["nothing"] is None
            return found["hidden"] + found["parts"][0]

    exact = without_dropout(Outer(Nested))
    model, x, found = recompute(hook(copy.deepcopy(exact))), batch(), []
    for each in (exact, model):
        each(x).square().mean().backward()
        found.append([p.grad for p in each.parameters()])

    assert all((a - b).norm() <= 0.05 * a.norm() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("frozen", [["first"], ["first", "blocks.0"], ["blocks"]])
def test_blocks_whose_inputs_have_no_graph_are_trained(hook, step, near, frozen):
    """As behind a frozen embedding: torch's re-entrant checkpoint alone would leave them without gradients."""
    exact = without_dropout(Model())
    for name in frozen:
        exact.get_submodule(name).requires_grad_(False)
    model, x = recompute(hook(copy.deepcopy(exact))), batch()

    assert near(step(model, x), step(exact, x))


def test_a_second_run_that_fails_leaves_nothing(hook, packed):
    model = recompute(hook(Model()))
    found = packed(model)
    loss = model(batch()).sum()
    removed = model.blocks[1].inner[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    removed.remove()

    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0
    assert [block.inner[2].momentum for block in model.blocks] == [0.1] * 3
    assert found


@pytest.mark.parametrize("bits", [4, 5])
def test_bits_that_change_between_the_two_runs(hook, step, near, bits):
    exact = without_dropout(Model())
    model, x = recompute(hook(copy.deepcopy(exact), bits=8)), batch()
    step(model, x)
    model.zero_grad()
    y = model(x)
    for site in HookedForward.of(model).hooks.sites:
        site.bits = bits
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))

    assert near([p.grad for p in model.parameters()], step(exact, x), within=0.5)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("first", "second"), [(2, 8), (8, 2.5), (3, 8)])
def test_a_second_run_of_compressed_layers_with_other_bits_decodes_right(per_sample, first, second):
    """The form is of the first run there, and the codes are of the second."""
    exact = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model, packer = copy.deepcopy(exact), SavedTensors(GroupQuantization(32))
    sites = [SiteState(str(index), first, per_sample=per_sample) for index in range(2)]
    for index, site in enumerate(sites):
        model[index] = compressed(model[index], packer, site)
    RecomputedForward(model).bind()
    x = torch.randn(16, 64)
    y = model(x)
    for site in sites:
        site.bits = second
    y.square().mean().backward()
    exact(x).square().mean().backward()

    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < (0.02 if second == 8 else 0.6) * other.grad.norm()
