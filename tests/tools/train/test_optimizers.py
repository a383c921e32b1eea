from __future__ import annotations

import pytest

from actbench.tools.train.records import TrainingCase
from actbench.tools.train.step import rate_factor

CASE = TrainingCase(model="m", data="d", batch_size=1, steps=100, learning_rate=0.1)


@pytest.mark.parametrize(
    ("fields", "step", "factor"),
    [
        ({}, 99, 1.0),
        ({"schedule": "cosine"}, 0, 1.0),
        ({"schedule": "cosine"}, 50, 0.5),
        ({"schedule": "cosine", "warmup_steps": 20}, 60, 0.5),
        ({"schedule": "multi_step"}, 49, 1.0),
        ({"schedule": "multi_step"}, 50, 0.1),
        ({"schedule": "multi_step", "gamma": 0.5}, 75, 0.25),
        ({"warmup_steps": 3}, 0, 0.25),
        ({"warmup_steps": 3}, 3, 1.0),
    ],
)
def test_the_rate_of_a_step(fields: dict[str, object], step: int, factor: float) -> None:
    assert rate_factor(CASE.model_copy(update=fields), step, 100) == pytest.approx(factor)
