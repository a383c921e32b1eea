import copy

import pytest
import torch
import torchvision
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.methods.randomized.sketched import Sketched
from actbench.scheme.setup import TrainingSetup


def convert(model, text="randomized:0.5"):
    return schemes.build(text).apply(TrainingSetup(model))


class Adapted(nn.Linear):
    pass


def test_linear_layers_become_sites_and_stay_themselves():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, nn.Linear(4, 4)))
    model[2][1].weight = shared.weight
    model[2][1].bias.requires_grad = False
    before = dict(model.named_parameters())
    setup = convert(model)

    assert setup.module is model
    assert [(site.path, site.was, site.becomes) for site in setup.sites] == [
        ("0", "nn.Linear", "rademacher sketch, ratio 0.5"),
        ("2.1", "nn.Linear", "rademacher sketch, ratio 0.5"),
    ]
    assert model[0] is model[2][0]
    assert model[0].sharing is model[2][1].sharing
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_a_lone_layer_is_replaced():
    assert isinstance(convert(nn.Linear(4, 4)).module, Sketched)


def test_what_is_left_alone_is_listed_with_the_reason():
    bound = nn.Linear(4, 4)
    bound.forward = lambda x: x
    model = nn.ModuleDict(
        {"plain": nn.Linear(4, 4), "lora": Adapted(4, 4), "bound": bound, "attention": nn.MultiheadAttention(4, 2)}
    )
    model["parametrized"] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    setup = convert(model)

    assert [site.path for site in setup.sites] == ["plain"]
    reasons = {entry.path: entry.reason for entry in setup.unreached}
    assert reasons.keys() == {"lora", "bound", "attention", "attention.out_proj", "parametrized"}
    assert "its weight is parametrized" in reasons["parametrized"]
    assert "subclass" in reasons["lora"]
    assert "another forward" in reasons["bound"]
    assert "without calling it" in reasons["attention.out_proj"]


def test_the_forward_of_a_torchvision_model_is_bit_equal():
    exact = torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=3)
    model = convert(copy.deepcopy(exact)).module
    x = torch.randn(3, 3, 32, 32)

    assert torch.equal(model(x), exact(x))


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ConversionError, match=r"Sequential has no nn.Linear .* 1 ReLU"):
        convert(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("randomized:0", "ratio=0 must be greater than 0"),
        ("randomized:-1", "ratio=-1 must be greater than 0"),
        ("randomized:2", "ratio=2 must be at most 1"),
        ("randomized:nan", "ratio=nan must be a finite number"),
        ("randomized:inf", "ratio=inf must be"),
        ("randomized:half", "ratio=half must be a valid number"),
        ("randomized:0.2,sketch=haar", "sketch=haar must be 'gaussian', .* 'hadamard', .* or 'wta'"),
        ("randomized:0.2,dim=0", "dim=0 must be greater than 0"),
        ("randomized:0.2,min=9,max=3", "min=9 is more than max=3"),
        ("randomized:0.2,bits=3", "no key 'bits'"),
    ],
)
def test_wrong_values_are_named(text, problem):
    with pytest.raises(SpecError, match=problem):
        schemes.build(text)


@pytest.mark.parametrize(
    "text",
    [
        "randomized:0.2",
        "randomized:0.1,sketch=gaussian,min=3",
        "randomized:0.2,dim=64",
        "randomized:0.2,sketch=rows_distinct",
    ],
)
def test_the_specification_builds_the_scheme_again(text):
    assert schemes.build(text).spec == text
    assert schemes.build("randomized") == schemes.build("randomized:0.2")
