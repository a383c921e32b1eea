"""``actbench.fit``: what it finds can be applied to a step, which then trains as the exact one does."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import actbench

OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(x)))

def make():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 8))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

def build():
    return make(), lambda n: {"x": torch.randn(n, 64), "y": torch.randint(0, 8, (n,))}, loss
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Return the path of a user's file, its names, and what fits of its model."""
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(OWN)
    names: dict = {"__name__": "mine"}
    exec(OWN, names)
    found = actbench.fit(
        f"{path}:build",
        device_profile="rtx-4090",
        batch_size=16384,
        memory_limit="120MiB",
        exact=True,
        schemes=["checkpoint", "accumulate:2", "accumulate:4"],
        jobs=2,
        budget_seconds=None,
    )
    return names, found


@pytest.mark.exhaustive
def test_plans_fit_and_train_as_asked(own):
    _, found = own

    assert found.fits
    assert found.limit_bytes == 120 << 20 < found.exact.need_bytes
    assert [plan.seconds for plan in found.plans] == sorted(plan.seconds for plan in found.plans)
    for plan in found.plans:
        assert plan.need_bytes <= found.limit_bytes
        assert plan.slowdown <= 2
        assert (plan.gradient, plan.training.is_exact) == ("exact", True)
    assert found.least.need_bytes <= found.plans[0].need_bytes


@pytest.mark.slow
def test_a_frontier_trades_time_for_bytes(own):
    _, found = own
    frontier = found.frontier()

    assert len(frontier) > 1
    pairs = list(itertools.pairwise(frontier))
    assert all(one.need_bytes > two.need_bytes and one.seconds <= two.seconds for one, two in pairs)


@pytest.mark.slow
def test_a_plan_is_applied_to_a_step_that_trains_as_the_exact_one(own):
    names, found = own
    batch = {"x": torch.randn(32, 64), "y": torch.randint(0, 8, (32,))}

    def trained(plan: object) -> list[torch.Tensor]:
        setup = actbench.TrainingSetup(
            names["make"](), loss=names["loss"], make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1)
        )
        step = actbench.TrainStep(plan.apply(setup))
        step.batch = batch
        step()
        return list(setup.module.parameters())

    (plan,) = found.plans[:1]
    assert plan.spec != "exact"
    for mine, theirs in zip(trained(plan), trained(found.exact), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
def test_a_plan_of_blocks_alone_converts_a_model(own):
    names, found = own
    of_blocks = [plan for plan in found.frontier() if plan.spec.startswith("checkpoint") and "+" not in plan.spec]
    model = names["make"]()

    assert of_blocks
    assert actbench.conversion_of(of_blocks[0].convert(model)).scheme == of_blocks[0].spec
    assert found.exact.convert(nn.Linear(2, 2)) is not None


@pytest.mark.parametrize(
    ("wrong", "error", "naming"),
    [
        ({"device_profile": "rtx-4091"}, actbench.UsageError, "did you mean rtx-4090"),
        ({"device_profile": "cuda-16gib"}, actbench.UsageError, "no time can be estimated"),
        ({"memory_limit": "24"}, actbench.UsageError, "not an amount of memory"),
        ({"schemes": ["gact:L2,only=model.layers.0"]}, actbench.UsageError, "leave only= out"),
        ({"schemes": ["checkpoint,every=2"]}, actbench.UsageError, "leave every= out"),
        ({"schemes": ["checkpont"]}, actbench.SpecError, "checkpoint"),
        ({"batch_sizes": 2}, actbench.UsageError, "no keyword 'batch_sizes'; did you mean batch_size?"),
        ({"budget": 20}, actbench.UsageError, "no keyword 'budget'; did you mean budget_seconds?"),
        ({"sequence": 20}, actbench.UsageError, "no keyword 'sequence'; did you mean sequence_length?"),
        ({"batch_size": 0}, actbench.UsageError, "actbench.fit: batch_size: 0 must be greater than 0"),
        ({"max_slowdown": 0.5}, actbench.UsageError, "actbench.fit: max_slowdown: 0.5 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(wrong, error, naming):
    with pytest.raises(error, match=naming):
        actbench.fit("tiny-llama", **{"device_profile": "rtx-4090", **wrong})
