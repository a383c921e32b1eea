"""What schemes that pack rows of tokens do with a network that also has convolutions."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from givenlayers import Doubled, gradients
from torch import nn

from actbench import scheme as schemes
from actbench.errors import NothingToConvertError
from actbench.scheme.setup import TrainingSetup


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("spec", ["hyclora:4", "prac:0.5"])
def test_convolutions_are_left_as_they_are_and_listed(spec: str) -> None:
    exact = nn.Sequential(
        Doubled(), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    setup = schemes.build(spec).apply(TrainingSetup(copy.deepcopy(exact)))
    x = torch.randn(64, 3, 6, 6)

    assert [site.path for site in setup.sites] == ["2", "3", "5"]
    assert [(place.path, place.kind, place.reason[:13]) for place in setup.unreached] == [
        ("1", "Conv2d", "a convolution")
    ]
    assert type(setup.module.get_submodule("1")) is nn.Conv2d
    found, wanted = gradients(setup.module, x), gradients(exact, x)
    for index in (0, 1, 2, 4):  # all but the linear layer's weight
        torch.testing.assert_close(found[index], wanted[index])
    assert not torch.allclose(found[3], wanted[3], rtol=0.01)
    with pytest.raises(NothingToConvertError, match="a convolution: the rows of its input are no tokens"):
        schemes.build(spec).apply(TrainingSetup(exact[:3]))
