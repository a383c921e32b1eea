import copy
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

import actbench
from actbench.errors import ConversionError
from actbench.packing.forwardwrapper import ReboundForward


class Doubled(ReboundForward):
    def __call__(self, *args, **kwargs):
        return 2 * self.inner(self.module, *args, **kwargs)


class Negated(ReboundForward):
    def __call__(self, *args, **kwargs):
        return -self.inner(self.module, *args, **kwargs)


def rebound():
    layer = nn.Linear(3, 3)
    Doubled(layer).bind()
    Negated(layer).bind()
    return layer


def test_forwards_stand_in_front_of_each_other():
    layer = rebound()
    x = torch.randn(2, 3)

    assert torch.equal(layer(x), -2 * nn.functional.linear(x, layer.weight, layer.bias))
    assert type(layer) is nn.Linear
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_each_is_found_behind_the_other():
    layer = rebound()

    assert isinstance(Doubled.of(layer), Doubled)
    assert isinstance(Negated.of(layer), Negated)
    assert Doubled.of(nn.Linear(3, 3)) is None


def test_a_copy_runs_its_own_module():
    layer = rebound()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            twin.weight.zero_()
            twin.bias.fill_(1)

        assert torch.equal(twin(torch.randn(1, 3)), torch.full((1, 3), -2.0))
        assert Doubled.of(twin).module is twin
    assert layer.weight.abs().sum() > 0


def test_a_forward_bound_by_others_still_runs():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x + 1
    Doubled(layer).bind()

    assert torch.equal(layer(torch.ones(3)), torch.full((3,), 4.0))


def test_the_signature_stays():
    layer = rebound()

    assert list(inspect.signature(layer.forward).parameters) == ["input"]


def test_data_parallel_is_refused_with_what_to_do():
    layer = rebound()
    for module in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), nn.Sequential(layer)):
        with pytest.raises(ConversionError, match=r"nn\.DataParallel does not go .*\.DistributedDataParallel"):
            replicated(module)

    Negated.of(layer).unbind()
    with pytest.raises(ConversionError, match="DataParallel"):
        replicated(layer)
    Doubled.of(layer).unbind()
    assert vars(layer).keys() == vars(nn.Linear(3, 3)).keys()


def replicated(module):
    """Do what nn.DataParallel does first in a pass on several devices: copy each module."""
    return [part._replicate_for_data_parallel() for part in module.modules()]


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.Sequential(nn.Identity(), nn.DataParallel(model))])
def test_a_model_in_data_parallel_is_refused_unchanged(wrap):
    model = wrap(nn.Sequential(nn.Linear(3, 3), nn.GELU()))
    with pytest.raises(ConversionError, match=r"is a DataParallel.* convert the Sequential inside \(its \.module\)"):
        actbench.convert(model, "fewbit:3")

    assert type(list(model.modules())[-1]) is nn.GELU


def test_a_model_is_freed_when_it_is_let_go():
    """Not only when the garbage collector runs: a model's memory is wanted back at once."""
    model = nn.Sequential(rebound())
    Doubled(model).bind()
    weak, forward = weakref.ref(model[0].weight), model.forward
    del model

    assert weak() is None
    with pytest.raises(ReferenceError, match="module of this forward is gone"):
        forward(torch.ones(3))
