"""Fused attention under hooks: of its inputs packed forms are kept, and its backward pass goes with them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actbench.methods.actnn.ops import groupquant

BATCH, ROWS, HEADS, WIDTH = 4, 32, 4, 16
SHAPE = (BATCH, HEADS, ROWS, WIDTH)


class Attention(nn.Module):
    def __init__(self, scale=1.0, mask=None, dropout=0.0, named=False):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.scale, self.mask, self.dropout, self.named = scale, mask, dropout, named

    def forward(self, x):
        parts = self.qkv(x).view(BATCH, ROWS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0] * self.scale, parts[1], parts[2]
        if self.named:
            return F.scaled_dot_product_attention(key=k, value=v, query=q)
        return F.scaled_dot_product_attention(q, k, v, self.mask, self.dropout)


def gradient(model, x):
    torch.manual_seed(3)
    output = model(x)
    model.zero_grad()
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return output.detach(), model.qkv.weight.grad.clone()


def error_of(model, hook, bits):
    x = torch.randn(BATCH, ROWS, 64)
    exact, wanted = gradient(model, x)
    output, found = gradient(hook(copy.deepcopy(model), bits=bits), x)
    assert torch.equal(output, exact)
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("named", [False, True])
def test_query_key_and_value_are_packed_and_nothing_else_is_kept(hook, named):
    model = hook(Attention(named=named), bits=4)

    output = model(torch.randn(BATCH, ROWS, 64))
    packed = output.grad_fn.saved_tensors

    one = groupquant.packed_bytes(BATCH * ROWS * 64, 4, 256)
    assert sum(part.nbytes for part in packed if part is not None) == 3 * one


@pytest.mark.parametrize("scale", [1.0, 8.0, 30.0])
def test_the_gradient_does_not_grow_with_the_scores(hook, scale):
    assert error_of(Attention(scale), hook, bits=4) < 1.5


def test_the_gradient_at_eight_bits_is_close(hook):
    assert error_of(Attention(), hook, bits=8) < 0.02


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masked_scores_leave_the_gradient_finite(hook, kind):
    seen = torch.ones(ROWS, ROWS).tril().bool()
    mask = seen if kind == torch.bool else torch.zeros(ROWS, ROWS).masked_fill(~seen, -torch.inf)

    assert error_of(Attention(mask=mask), hook, bits=8) < 0.02


def test_dropout_drops_the_same_in_both_passes(hook):
    assert error_of(Attention(dropout=0.5), hook, bits=8) < 0.02


class Layer(nn.Module):
    def __init__(self, dropout=0.0, **options):
        super().__init__()
        self.layer, self.options = nn.MultiheadAttention(64, HEADS, dropout, batch_first=True), options

    def forward(self, x):
        x = x * 2
        return self.layer(x, x, x, **self.options)[0]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_torchs_own_layers_are_as_close_as_the_function(hook, near, need_weights, masked, dropout):
    mask = torch.zeros(ROWS, ROWS).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf) if masked else None
    exact = Layer(dropout, need_weights=need_weights, attn_mask=mask)
    model, x, found = hook(copy.deepcopy(exact)), torch.randn(BATCH, ROWS, 64), []
    for each in (exact, model):
        torch.manual_seed(3)
        output = each(x)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        found.append([output.detach(), each.layer.in_proj_weight.grad, each.layer.out_proj.weight.grad])

    assert torch.equal(found[0][0], found[1][0])
    assert near(found[1][1:], found[0][1:])


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("need_weights", [False, True])
def test_of_torchs_own_layers_nothing_but_masks_and_packed_forms_is_kept(hook, packed, need_weights, dropout):
    """Four inputs of layers or products with weights, and four more and the probabilities; no scores are kept."""
    model = hook(Layer(dropout, need_weights=need_weights), bits=4)
    found = packed(model)
    model(torch.randn(BATCH, ROWS, 64))
    storages = {part.untyped_storage() for _, held in found if hasattr(held, "packed") for part in held.packed.parts}
    whole = [held.tensor for _, held in found if not hasattr(held, "packed") and held.tensor.is_floating_point()]
    one, scores = BATCH * ROWS * 64, BATCH * HEADS * ROWS * ROWS

    inputs = 2 * groupquant.packed_bytes(one, 4, 256)  # of the two projections
    if need_weights:  # scaled queries, keys, values; probabilities before dropout, and after it
        products = 3 * groupquant.packed_bytes(one, 4, 256)
        products += (2 if dropout else 1) * groupquant.packed_bytes(scores, 4, 256)
        assert sum(storage.nbytes() for storage in storages) == inputs + products
    else:
        assert sum(storage.nbytes() for storage in storages) == inputs
    assert {tensor.shape for tensor in whole} <= {(192, 64), (64, 192), (64, 64)}


def test_a_mask_that_is_learnt_has_its_gradient(hook):
    mask = nn.Parameter(torch.randn(ROWS, ROWS))
    x = torch.randn(BATCH, ROWS, 64)
    model = Attention(mask=mask)
    gradient(model, x)
    wanted = mask.grad.clone()

    gradient(hook(model), x)

    assert torch.norm(mask.grad - wanted) < 0.02 * torch.norm(wanted)


def test_a_parameter_in_autocasts_type_stays_whole(hook, packed):
    model = hook(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)))
    found = packed(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(8, 64, requires_grad=True)).sum().backward()

    weights = [held for shape, held in found if set(shape) in ({64, 96}, {96, 32})]
    assert weights
    assert not any(hasattr(held, "packed") for held in weights)


def test_truth_values_are_no_part_of_what_is_shared_out(hook):
    from actbench.methods.gact.sensitivity import Probing

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x):
            hidden = self.first(x)
            return self.last(hidden.masked_fill(hidden > 1, 0.0).tanh())

    model = hook(Masked(), bits=4, probing=Probing(4.0, 1000))
    model(torch.randn(32, 64)).sum().backward()

    assert torch.isfinite(model.first.weight.grad).all()


def test_a_pass_that_cannot_be_probed_trains_with_the_bits_there_are(hook):
    from actbench.methods.gact.sensitivity import Probing

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 8)

        def forward(self, x, adjacency):
            return adjacency @ self.layer(x)

    model = hook(Graph(), bits=4, probing=Probing(4.0, 1000))
    with pytest.warns(UserWarning, match=r"pass that allocates them failed.*auto_prec=false"):
        model(torch.randn(32, 64), torch.randn(32, 32)).sum().backward()

    assert torch.isfinite(model.layer.weight.grad).all()


def test_fused_attention_in_a_recomputed_block(hook):
    """Its second run is packed as the first would be: saved as they are, packed scores would not go with their sums."""
    from actbench.methods.checkpointing.recomputed import RecomputedForward

    class Around(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.block = Attention(scale)

        def forward(self, x):
            return self.block(x * 1)

        @property
        def qkv(self):
            return self.block.qkv

    x, errors = torch.randn(BATCH, ROWS, 64), []
    exact = Around(30.0)
    _, wanted = gradient(exact, x)
    model = hook(copy.deepcopy(exact), bits=4)
    RecomputedForward(model.block, "block").bind()
    for _ in range(3):
        _, found = gradient(model, x)
        errors.append(float((found - wanted).norm() / wanted.norm()))

    assert max(errors) < 2
