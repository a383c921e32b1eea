import copy

import pytest
import torch
import torchvision
from torch import nn

from actbench import schemes
from actbench.errors import ConversionError, SpecError
from actbench.schemes.checkpoint import Checkpoint
from actbench.setup import TrainingSetup


def convert(model, text="checkpoint"):
    return schemes.build(text).apply(TrainingSetup(model))


class Block(nn.Sequential):
    pass


def plain():
    return nn.Sequential(*(Block(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))


def test_every_block_is_a_site_and_names_and_types_stay():
    model = torchvision.models.resnet18()
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    setup = convert(model)

    assert [site.path for site in setup.sites] == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert {(site.was, site.becomes) for site in setup.sites} == {("BasicBlock", "recomputed")}
    assert setup.module is model
    assert (list(model.state_dict()), [type(module) for module in model.modules()]) == (keys, types)


def test_every_nth_block_and_blocks_by_name():
    assert [site.path for site in convert(plain(), "checkpoint,blocks=Block").sites] == list("01234")
    assert [site.path for site in convert(plain(), "checkpoint,every=2,blocks=Block").sites] == list("024")
    assert [site.path for site in convert(plain(), "checkpoint,every=9,blocks=Block/Tanh").sites] == ["0"]


def test_gradients_are_exact():
    exact = plain()
    model = convert(copy.deepcopy(exact), "checkpoint,blocks=Block").module
    x = torch.randn(3, 4)
    for each in (exact, model):
        each(x).sum().backward()

    assert all(torch.equal(a.grad, b.grad) for a, b in zip(exact.parameters(), model.parameters(), strict=True))


def test_converting_twice_or_nothing_is_an_error():
    with pytest.raises(ConversionError, match="recomputes its blocks already"):
        convert(convert(torchvision.models.resnet18()).module)
    with pytest.raises(
        ConversionError, match=r"VGG has no block that actbench knows; .*blocks=MyBlock; it holds .*Conv2d"
    ):
        convert(torchvision.models.vgg11(init_weights=False))
    with pytest.raises(ConversionError, match="no module of class Blok"):
        convert(plain(), "checkpoint,blocks=Blok")


def test_a_name_that_is_no_class_is_refused():
    with pytest.raises(ValueError, match="'A/B' is not the name of a class"):
        Checkpoint(blocks=("Block", "A/B"))


@pytest.mark.parametrize("text", ["checkpoint,every=0", "checkpoint,every=1.5", "checkpoint:3"])
def test_wrong_values_are_refused(text):
    with pytest.raises(SpecError, match=r"every|no value"):
        schemes.build(text)
