"""Steps on packed state: Numba is the reference bit for bit, and what it computes is what torch.optim computes."""

import numpy as np
import pytest
import torch

from actbench.methods.formats.ops import smaq, smaqstep
from actbench.methods.formats.ops.smaq.format import Format
from actbench.methods.formats.ops.smaqstep import rules as steprules

ops = torch.ops.actbench
USUAL = Format(6, 7, 64, 256)
FORMS = (USUAL, Format(6, 8, 64, 256), Format(3, 8, 5, 64), Format(8, 8, 96, 96), Format(6, 7, 0, 256))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "maximize": False}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False, "maximize": False}
ADAMS = (
    ADAM,
    {**ADAM, "decoupled": False},
    {**ADAM, "betas": (0.3, 0.9), "maximize": True, "weight_decay": 0.0},
)
SGDS = (SGD, {**SGD, "nesterov": True}, {**SGD, "dampening": 0.5, "maximize": True, "weight_decay": 0.0})


def normal(count, dtype=torch.float32, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(count, dtype, step):
    """Return a normal sample whose parts are ordinary, zero, half zero, tiny, one for all, and not finite."""
    g = normal(count, dtype, seed=step)
    g[300:600], g[700:900:2], g[1100:1300] = 0, 0, 0.125
    g[900:1100] *= 2.0**-14
    g[2000:2001], g[2500:2501] = torch.inf, torch.nan
    return g


def zeros(count, form):
    return torch.zeros(form.packed_bytes(count), dtype=torch.uint8)


def same(one, other):
    """Return whether two tensors have the same bits; all NaN are one."""
    if one.is_floating_point():
        one, other = (torch.where(x.isnan(), torch.nan, x) for x in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [*DTYPES[:-1], pytest.param(DTYPES[-1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", ADAMS)
def test_adam_is_the_reference(options, dtype):
    for count, form in ((0, USUAL), (1, USUAL), (257, USUAL), *((3001, form) for form in FORMS)):
        states = [(normal(count, dtype), zeros(count, form), zeros(count, form)) for _ in range(2)]
        for step in range(1, 4):
            rule, g = steprules.adam_rule(step, **options), gradient(count, dtype, step)
            for function, state in zip((smaqstep.adam_, smaqstep.reference_adam_), states, strict=True):
                p, means, roots = state
                function(p, g, means, roots, 17 * step, rule, form)
        assert all(same(one, other) for one, other in zip(*states, strict=True)), (count, form)


@pytest.mark.parametrize("dtype", [*DTYPES[:-1], pytest.param(DTYPES[-1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", SGDS)
def test_sgd_is_the_reference(options, dtype):
    for count, form in ((0, USUAL), (1, USUAL), (257, USUAL), *((3001, form) for form in FORMS)):
        states = [(normal(count, dtype), zeros(count, form)) for _ in range(2)]
        for step in range(1, 4):
            rule, g = steprules.sgd_rule(step, **options), gradient(count, dtype, step)
            for function, (p, buffers) in zip((smaqstep.sgd_, smaqstep.reference_sgd_), states, strict=True):
                function(p, g, buffers, 17 * step, rule, form)
        assert all(same(one, other) for one, other in zip(*states, strict=True)), (count, form)


@pytest.mark.parametrize("options", ADAMS)
def test_the_rule_of_adam_is_torchs(options):
    wide = {**options}
    decoupled = wide.pop("decoupled")
    parameter = torch.nn.Parameter(normal(1000))
    theirs = torch.optim.Adam([parameter], foreach=False, decoupled_weight_decay=decoupled, **wide)
    p, m, s = parameter.detach().clone(), torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 6):
        parameter.grad = normal(1000, seed=step)
        theirs.step()
        p, m, s = steprules.adam(p, parameter.grad, m, s, steprules.adam_rule(step, **options))
        torch.testing.assert_close(p, parameter.detach(), rtol=2e-6, atol=5e-7)
        torch.testing.assert_close(m, theirs.state[parameter]["exp_avg"], rtol=2e-6, atol=5e-7)
        torch.testing.assert_close(s.square(), theirs.state[parameter]["exp_avg_sq"], rtol=2e-5, atol=0)


@pytest.mark.parametrize("options", SGDS)
def test_the_rule_of_sgd_is_torchs(options):
    parameter = torch.nn.Parameter(normal(1000))
    theirs = torch.optim.SGD([parameter], foreach=False, **options)
    p, b = parameter.detach().clone(), torch.zeros(1000)
    for step in range(1, 6):
        parameter.grad = normal(1000, seed=step)
        theirs.step()
        p, b = steprules.sgd(p, parameter.grad, b, steprules.sgd_rule(step, **options))
        torch.testing.assert_close(p, parameter.detach(), rtol=2e-6, atol=5e-7)
        torch.testing.assert_close(b, theirs.state[parameter]["momentum_buffer"], rtol=2e-6, atol=5e-7)


def test_a_coefficient_is_one_that_float32_holds():
    for rule in (steprules.adam_rule(7, **ADAM), steprules.sgd_rule(7, **SGD)):
        assert all(float(np.float32(value)) == value for value in rule)


def test_zero_bytes_are_zeros():
    for form in FORMS:
        assert not smaq.decode(zeros(300, form), 300, torch.float32, form=form).any()


def test_what_is_stored_is_the_moments_in_the_mean_over_seeds():
    count, rule = 512, steprules.adam_rule(1, **ADAM)
    g, total, seeds = normal(count), torch.zeros(2, count, dtype=torch.float64), 400
    squares = torch.zeros_like(total)
    exact = torch.stack([g * np.float32(0.1), g.abs() * rule.rest2**0.5]).double()
    for seed in range(seeds):
        means, roots = zeros(count, USUAL), zeros(count, USUAL)
        smaqstep.adam_(normal(count, seed=1), g, means, roots, seed, rule, USUAL)
        error = torch.stack([smaq.decode(x, count, torch.float32) for x in (means, roots)]).double() - exact
        total, squares = total + error, squares + error.square()
    for mean, square in zip(total / seeds, squares / seeds, strict=True):
        seen = square > 1e-3 * square.mean()
        scores = mean[seen] / (square[seen] / seeds).sqrt()
        assert abs(scores.square().mean() - 1) < 6 * (2 / scores.numel()) ** 0.5
    first, second = (total[0] * total[1]).sum(), (squares[0] * squares[1]).sum().sqrt()
    assert abs(first / second) < 4.5  # noises of their own


def test_a_root_that_is_decoded_to_zero_throws_nothing_far():
    """The elements' second moments are within a step of zero, the first ones are not, and there is no gradient."""
    roots = smaq.encode(torch.linspace(0, 1, 256), torch.tensor(0), stochastic=False)
    means = smaq.encode(torch.full((256,), 0.1), torch.tensor(0), stochastic=False)
    assert (smaq.decode(roots, 256, torch.float32) <= 0.01).any()
    p, rule = torch.zeros(256), steprules.adam_rule(1000, **{**ADAM, "weight_decay": 0.0})
    smaqstep.adam_(p, torch.zeros(256), means, roots, 0, rule, USUAL)
    main_end = 0.375  # of a quarter of the farthest from 1/2
    assert p.abs().max() <= 1e-2 * 0.09 / (main_end / 15 / 2 * 0.99)


@pytest.mark.parametrize("step", [(smaqstep.adam_, smaqstep.sgd_), (smaqstep.reference_adam_, smaqstep.reference_sgd_)])
@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_whole_blocks_is_stepped_as_in_the_whole(step, form):
    count, first = 20 * form.block + 40, 7 * form.block
    g, adam, sgd = gradient(count, torch.float32, 1), steprules.adam_rule(2, **ADAM), steprules.sgd_rule(2, **SGD)
    for function, rule, moments in ((step[0], adam, 2), (step[1], sgd, 1)):
        p, packed = normal(count), [zeros(count, form) for _ in range(moments)]
        parts = [p[:first].clone(), p[first:].clone()]
        packed_parts = [[zeros(part.numel(), form) for _ in range(moments)] for part in parts]
        function(p, g, *packed, 5, rule, form)
        for part, of_part, start in zip(parts, packed_parts, (0, first), strict=True):
            function(part, g[start : start + part.numel()], *of_part, 5, rule, form, first=start)
        assert same(torch.cat(parts), p)
        assert all(same(torch.cat(of_parts), each) for *of_parts, each in zip(*packed_parts, packed, strict=True))
