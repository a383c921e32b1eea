import io

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.ops.noise import restore_seeds, saved_seeds
from actbench.packing.forwardwrapper import adapt, adapted_states
from actbench.packing.hooked import HookedForward
from actbench.packing.samplegradients import samples
from actbench.scheme.setup import TrainingSetup


def converted(spec, width=32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 1))
    net[4].weight.data *= 0.01  # so that layers need different bits
    return schemes.build(spec).apply(TrainingSetup(net)).module


def step(model):
    with samples(torch.randperm(100)[:64]):
        model(torch.randn(64, 32) * 2).square().mean().backward()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(model):
    return {layer.site.path: layer.site.bits for layer in model.modules() if hasattr(layer, "site")}


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("keys", ["", ",use_gradient=true,group_size=32"])
def test_actnn_goes_on_as_if_nothing_had_been(steps, keys):
    spec = f"actnn:L3,bits=3.2,adapt_interval=2{keys}"
    model, other = converted(spec), converted(spec)
    torch.manual_seed(1)
    for _ in range(steps):
        step(model)
    adapt(other, through_a_file(adapted_states(model)))
    step(converted("actnn:L2"))  # so that there are seeds to go on with
    state, seeds = torch.get_rng_state(), saved_seeds()
    assert bits(other) == bits(model)
    for each in (model, other):
        torch.set_rng_state(state)
        restore_seeds(seeds)
        for _ in range(3):
            step(each)

    assert bits(other) == bits(model)
    assert len(set(bits(model).values())) > 1
    left, right = (through_a_file(adapted_states(each)) for each in (model, other))
    table = "use_gradient" in keys
    for path, site in left[":CompressedForward"]["places"].items():
        found = right[":CompressedForward"]["places"][path]
        torch.testing.assert_close(found, site, rtol=0, atol=0, equal_nan=True)
        assert (site["history"] is not None) == table


def test_gact_has_its_bits_and_counts_on():
    model, other = converted("gact:L2.2,adapt_interval=3"), converted("gact:L2.2,adapt_interval=3")
    for _ in range(2):
        step(model)
    adapt(other, through_a_file(adapted_states(model)))
    one, two = (HookedForward.of(each) for each in (model, other))

    assert two.probing.passes == one.probing.passes == {"": 2}
    assert {site.path: site.bits for site in two.hooks.sites} == {p.path: p.bits for p in one.hooks.sites}
    assert len({site.bits for site in two.hooks.sites}) > 1


def test_costs_on_their_way_to_the_host_arrive():
    class Never:
        def query(self):
            return False

        def synchronize(self):
            pass

    model, other = converted("actnn:L3,adapt_interval=9"), converted("actnn:L3,adapt_interval=9")
    step(model)
    allocation = CompressedForward.of(model).allocation
    allocation.begin()  # shares out at once on the host
    shared_out = bits(model)
    again = converted("actnn:L3,adapt_interval=9")
    step(again)
    waiting = CompressedForward.of(again).allocation
    waiting._gather()
    object.__setattr__(waiting._seen, "copied", Never())
    adapt(other, through_a_file(adapted_states(again)))
    step(other)

    assert set(bits(other)) == set(shared_out)
    assert CompressedForward.of(other).allocation._seen is None
    assert len(set(bits(other).values())) > 1


def test_states_of_another_model_are_refused():
    states = adapted_states(converted("actnn:L3"))

    assert list(states) == [":CompressedForward"]
    assert adapted_states(nn.Linear(2, 2)) == {}
    with pytest.raises(KeyError, match="HookedForward"):
        adapt(converted("gact:L2"), states)
    del states[":CompressedForward"]["places"]["0"]
    with pytest.raises(KeyError, match="0"):
        adapt(converted("actnn:L3"), states)
