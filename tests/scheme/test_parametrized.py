"""Layers whose weight torch computes from other parameters: schemes that replace layers leave them, and say so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from actbench import conversion_of, convert
from actbench.errors import NothingToConvertError

REASON = "its weight is parametrized (torch.nn.utils.parametrize)"


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def model() -> nn.Sequential:
    norm = nn.BatchNorm2d(8)
    parametrize.register_parametrization(norm, "weight", Doubled())
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 8, 3)),
        norm,
        parametrizations.spectral_norm(nn.Conv2d(8, 8, 3)),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(8, 4)),
        nn.Linear(4, 2),
    )


@pytest.mark.parametrize(
    ("scheme", "left"),
    [
        ("actnn:L3", ["0", "1", "2", "5"]),
        ("actnn:L1", ["0", "2", "5"]),  # it leaves batch norms
        ("dropit", ["0", "2", "5"]),
        ("velora", ["5"]),
        ("randomized:0.5", ["5"]),
    ],
)
def test_parametrized_layers_are_named_with_the_reason(scheme: str, left: list[str]) -> None:
    converted = convert(model(), scheme)
    conversion = conversion_of(converted)

    assert conversion is not None
    assert [place.path for place in conversion.unreached] == left
    assert {place.reason for place in conversion.unreached} == {REASON}
    assert "6" in {site.path for site in conversion.sites}
    converted(torch.randn(2, 3, 7, 7)).sum().backward()
    assert all(parameter.grad is not None for parameter in converted.parameters())


@pytest.mark.parametrize("scheme", ["actnn:L3", "dropit"])
def test_a_model_of_parametrized_layers_alone_is_refused_with_the_reason(scheme: str) -> None:
    with pytest.raises(NothingToConvertError, match=r"no layer to convert; 0: its weight is parametrized"):
        convert(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.GELU()), scheme)
