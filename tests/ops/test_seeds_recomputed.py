"""Seeds where blocks run again in the backward pass: all different, and the masks of dropout are not."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

from actbench import scheme as schemes
from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.methods.checkpointing.recomputed import RecomputedForward
from actbench.ops import noise
from actbench.packing import SavedTensors
from actbench.packing.hooked import HookedForward, Hooks
from actbench.scheme.setup import TrainingSetup

WIDTH = 64


class Drawn:
    """Notes every seed that is drawn inside of a with-block, by whichever operator."""

    def __init__(self):
        self.seeds = []
        self._take, self._at_once = noise._seeds.take, noise._AT_ONCE

    def __enter__(self):
        noise._seeds.take, noise._AT_ONCE = self._noted, 1  # what is taken is used
        return self

    def _noted(self, device, count):
        seeds = self._take(device, count)
        self.seeds += seeds.tolist()
        return seeds

    def __exit__(self, *error):
        del noise._seeds.take
        noise._AT_ONCE = self._at_once


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x):
        return x + self.dropout(self.second(nn.functional.gelu(self.first(x)))).tanh()


class Model(nn.Module):
    """Recomputes its blocks by torch's checkpointing where ``reentrant`` is not None."""

    def __init__(self, p, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block(p) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def converted(spec, p=0.0, reentrant=None):
    return schemes.build(spec).apply(TrainingSetup(Model(p, reentrant).train())).module


def train(model, steps=2, backwards=1):
    """Return all seeds of some steps after a manual seed, and the last gradients."""
    torch.manual_seed(7)
    with Drawn() as drawn:
        for _ in range(steps):
            x = torch.ones(32, WIDTH).cumsum(0).requires_grad_()
            model.zero_grad()
            loss = model(x).square().mean()
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
    return drawn.seeds, [p.grad for p in model.parameters()]


SPECS = ("gact:L1", "smaq", "actnn:L2", "encode:s2fp8", "randomized:0.5")


@pytest.mark.parametrize(
    ("spec", "reentrant", "p"),
    [(spec, None, 0.0) for spec in SPECS]
    + [("gact:L1", None, 0.3), ("actnn:L2", None, 0.3)]
    + [(spec, reentrant, 0.0) for spec in ("gact:L1", "actnn:L2", "randomized:0.5") for reentrant in (True, False)],
)
def test_all_seeds_of_several_steps_are_different_and_follow_manual_seed(spec, reentrant, p):
    model = converted(spec + ("+checkpoint,blocks=Block" if reentrant is None else ""), p, reentrant)
    seeds, gradients = train(model)
    again, same = train(model)

    assert len(seeds) >= 2 * 2
    assert len(set(seeds)) == len(seeds)
    assert again == seeds
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


@pytest.mark.parametrize("spec", ["gact:L1", "randomized:0.5"])
def test_a_graph_that_is_kept_is_recomputed_with_other_seeds(spec):
    seeds, _ = train(converted(f"{spec}+checkpoint,blocks=Block"), steps=2, backwards=3)

    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("reentrant", [True, False])
def test_seeds_are_different_under_the_checkpointing_of_transformers(reentrant):
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    model = schemes.build("actnn:L2").apply(TrainingSetup(BertModel(config))).module.train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with Drawn() as drawn:
        for _ in range(2):
            model(torch.arange(48).reshape(4, 12)).last_hidden_state.square().mean().backward()

    assert len(drawn.seeds) > 20
    assert len(set(drawn.seeds)) == len(drawn.seeds)


@pytest.mark.parametrize("spec", ["gact:L1", "actnn:L2"])
def test_dropout_masks_are_those_of_the_first_run_and_of_the_exact_model(spec):
    masks = []
    for text in ("exact", f"{spec}+checkpoint,blocks=Block"):
        model, found = converted(text, 0.3), []
        for index, block in enumerate(model.blocks):
            block.dropout.register_forward_hook(
                lambda module, args, y, index=index, found=found: found.append((index, y.detach() == 0))
            )
        train(model)
        masks.append(found)
    exact, both = masks
    order = [0, 1, 2, 2, 1, 0]

    assert [index for index, _ in both] == order * 2
    for step in range(2):
        expected = [exact[3 * step + index][1] for index in order]
        assert all(torch.equal(a, b[1]) for a, b in zip(expected, both[6 * step : 6 * step + 6], strict=True))


class Square(nn.Module):
    """Gives what it was given, by way of the square of it."""

    def __init__(self, x):
        super().__init__()
        self.register_buffer("inverse", 1 / x)

    def forward(self, x):
        return x.square() * self.inverse


def test_the_mean_gradient_of_identical_blocks_is_the_exact_one():
    """With one seed for all blocks the errors of their equal inputs are equal, and their product has another mean."""
    x = torch.rand(64, 256, generator=torch.Generator().manual_seed(1)) + 1
    model, packer = nn.Sequential(*(nn.Sequential(Square(x)) for _ in range(3))), SavedTensors(GroupQuantization())
    for block in model:
        HookedForward(block[0], Hooks(packer, 1, {}, whole_model=False)).bind()
        RecomputedForward(block).bind()
    CompressedForward(model, packer, hooked=True).bind()
    found = []
    torch.manual_seed(0)
    for _ in range(20):
        leaf = x.clone().requires_grad_()
        model(leaf).sum().backward()
        found.append(leaf.grad / 8)

    assert abs(float(torch.stack(found).mean()) - 1) < 0.005
    assert torch.stack(found).std() > 0.1


class DrawingInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        noise.fresh_seed(torch.empty(0))
        return 1 / 0 if ctx.fails else gradient, None


def test_seeds_of_backward_passes_follow_manual_seed_after_one_that_failed():
    def three(fails):
        torch.manual_seed(0)
        x = torch.ones(2, requires_grad=True)
        with Drawn() as drawn:
            noise.fresh_seed(torch.empty(0))
            try:
                for _ in range(3):
                    DrawingInBackward.apply(x, fails).sum().backward()
            except ZeroDivisionError:
                pass
        return drawn.seeds

    first = three(False)
    three(True)

    assert len(set(first)) == 4
    assert three(False) == first


def test_a_backward_pass_changes_no_number_of_the_generator():
    numbers = []
    for draws in (True, False):
        torch.manual_seed(0)
        x = torch.ones(2, requires_grad=True)
        (DrawingInBackward.apply(x, False) if draws else x * 1).sum().backward()
        numbers.append(torch.rand(1300))

    assert torch.equal(*numbers)
