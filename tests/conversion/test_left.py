"""What a scheme works on outside of the model is said when a model alone is converted."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import nn

import actbench


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def test_that_the_state_of_the_optimizer_stays_is_said_once() -> None:
    with pytest.warns(UserWarning, match="optimizer") as caught:
        actbench.convert(model(), "smaq")

    (warning,) = caught
    assert "smaq: optimizer state stays as it is" in str(warning.message)
    assert "actbench.optim.packed(optimizer, encoding=" in str(warning.message)
    assert Path(warning.filename) == Path(__file__)


@pytest.mark.parametrize("scheme", ["smaq,on=activations", "fewbit:3", "gact"])
def test_where_nothing_stays_outside_nothing_is_said(scheme: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actbench.convert(model(), scheme)
