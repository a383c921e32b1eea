from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from actbench.tools.train.evaluation import evaluating


def test_random_numbers_modes_and_gradients_are_as_before() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
    before = torch.get_rng_state()
    with evaluating(module):
        torch.rand(3)
        assert [part.training for part in module.modules()] == [False] * 3
        assert not torch.is_grad_enabled()

    assert torch.equal(torch.get_rng_state(), before)
    assert (module.training, module[0].training, module[1].training) == (True, True, False)


def test_gpus_of_other_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a list torch takes the random numbers of all, initializes each of them for that, and warns."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: pytest.fail(f"device {device} was asked"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with evaluating(nn.Linear(2, 2)):
            pass
