"""The RegNets of the benchmarks have as many parameters as those that were measured, by the page of their speeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

PUBLISHED = {
    "x_200mf": 2.68,
    "x_400mf": 5.16,
    "x_600mf": 6.20,
    "x_4gf": 22.12,
    "x_6_4gf": 26.21,
    "x_12gf": 46.11,
    "y_200mf": 3.16,
    "y_600mf": 6.06,
    "y_800mf": 6.26,
    "y_4gf": 20.65,
    "y_6_4gf": 30.58,
    "y_8gf": 39.18,
    "y_12gf": 51.82,
}
"""Millions of parameters."""


@pytest.mark.parametrize(("name", "millions"), PUBLISHED.items())
def test_a_regnet_has_the_parameters_of_the_one_that_was_measured(script: Any, name: str, millions: float) -> None:
    with torch.device("meta"):
        module = getattr(script, name)()[0]

    assert sum(parameter.numel() for parameter in module.parameters()) == pytest.approx(millions * 1e6, abs=5e3)


def test_its_loss_is_of_images_and_labels(script: Any) -> None:
    with torch.device("meta"):
        module, batch, loss = script.y_200mf()

        assert loss(module, batch(2)).shape == ()
