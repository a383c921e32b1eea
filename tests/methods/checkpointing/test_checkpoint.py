import copy

import pytest
import torch
import torchvision
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.methods.checkpointing.scheme import Checkpoint
from actbench.scheme.setup import TrainingSetup


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


def test_a_model_without_known_blocks_is_refused():
    with pytest.raises(
        ConversionError, match=r"VGG has no block that actbench knows; .*blocks=MyBlock; it holds 2 Sequential"
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


class Leaf(nn.Linear):
    pass


class Conformer(nn.Module):
    """Two of the same inside of a block are no blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(nn.Linear(4, 4), nn.Tanh()), Block(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return self.second(self.first(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers = Conformer(), nn.ModuleList([Conformer(), Conformer(), Leaf(4, 4), Leaf(4, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Stages(nn.Module):
    """One block in each container, and blocks that stand as attributes."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Sequential(Conformer()), nn.Sequential(Conformer()), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.two(self.one(x)))


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (Encoder, ["stem", "layers.0", "layers.1"]),
        (Stages, ["one.0", "two.0"]),
        (plain, list("01234")),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2),
            ["layers.0", "layers.1"],
        ),
    ],
)
def test_blocks_of_an_unknown_model_are_found_by_what_repeats(model, paths):
    assert [site.path for site in convert(model()).sites] == paths


def test_where_nothing_repeats_the_containers_are_named():
    model = nn.Sequential(Block(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConversionError, match=r"checkpoint,blocks=MyBlock; it holds 1 Block$"):
        convert(model)
    with pytest.raises(ConversionError, match=r"it holds 2 Linear$"):
        convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
