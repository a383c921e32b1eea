"""Values and shapes that only a real run could know."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from actbench.errors import UntraceableError
from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation


def simulated() -> Simulation:
    return Simulation(profiles.get("rtx-4090"))


def unknown(*shape: int) -> Tensor:
    """Return a tensor on the card whose values follow from weights."""
    return nn.Linear(512, math.prod(shape)).cuda()(torch.ones(1, 512, device="cuda")).view(shape)


def test_unknown_numbers_are_one() -> None:
    with simulated():
        x = unknown(3, 4)

        assert x.sum().item() == 1.0
        assert float(x.mean().detach()) == 1.0
        assert f"{x.norm():.2f}" == "1.00"
        assert x.detach().cpu().numpy().tolist() == [[1.0] * 4] * 3
        assert x.argmax().item() == 1


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (lambda x: torch.isnan(x).any(), False),
        (lambda x: torch.isinf(x.sum()), False),
        (lambda x: torch.isfinite(x).all(), True),
        (lambda x: ~torch.isfinite(x.norm()), False),
        (lambda x: x.norm() > 1, False),
        (lambda x: x.norm() >= 1, True),
        (lambda x: x.mean() < 2, True),
        (lambda x: (x.max() > 10).cpu(), False),
        (lambda x: torch.logical_or(x.sum().isnan(), x.sum().isinf()), False),
        (lambda x: torch.stack([x.sum().isnan(), x.sum().isinf()]).any(), False),
    ],
)
def test_predicates_are_what_they_are_for_ones(predicate, expected: bool) -> None:  # type: ignore[no-untyped-def]
    with simulated():
        assert bool(predicate(unknown(3, 4))) is expected


@pytest.mark.slow
def test_values_that_follow_from_no_weight_are_known() -> None:
    with simulated():
        labels = torch.tensor([3, 1, 2, 1]).cuda()
        boxes = torch.tensor([[0.0, 1.0, 2.0, 3.5]]).cuda()

        assert (labels == 1).sum().item() == 2
        assert labels.max().item() == 3
        assert (labels == 1).nonzero().flatten().tolist() == [1, 3]
        assert labels.bincount().tolist() == [0, 2, 1, 1]
        assert (boxes[:, 2:] - boxes[:, :2]).tolist() == [[2.0, 2.5]]
        assert unknown(4, 8)[labels == 1].shape == (2, 8)


@pytest.mark.slow
def test_shapes_that_nobody_knows_are_the_largest_and_said_to_be() -> None:
    with simulated() as card:
        x = unknown(6, 2)
        kept = x[x[:, 0] > 0]

        assert kept.shape == (6, 2)
        assert (x > 0).nonzero().shape == (12, 2)
        assert torch.masked_select(x, x > 0).shape == (12,)
        assert x.flatten().unique().shape == (12,)

    assert any("test_values.py" in text for text in card.at_most)


def test_a_shape_without_a_bound_is_refused() -> None:
    with simulated(), pytest.raises(UntraceableError, match=r"aten::bincount.*--meter cuda"):
        unknown(6, 2).flatten().long().bincount()


def test_a_scaler_finds_no_infinite_gradient() -> None:
    """Else it would leave out each step, and the optimizer's state would never be made."""
    with simulated() as card:
        module = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.AdamW(module.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(9):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = module(torch.randn(8, 512, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert card.measurement.optimizer_bytes == 2 * card.measurement.weights_bytes
