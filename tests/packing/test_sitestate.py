from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench.methods.actnn.bitallocation import variance
from actbench.packing import samplegradients
from actbench.packing.samplegradients import SampleGradients
from actbench.packing.sitestate import SiteState


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 5, 5)])
def test_gradients_are_seen_as_squared_norms(dtype, shape):
    grad = torch.randn(shape).to(dtype)
    rows, whole, unwatched = (
        SiteState("", 2, per_sample=True, watched=True),
        SiteState("", 2, watched=True),
        SiteState("", 2),
    )
    for site in (rows, whole, unwatched):
        site.see_gradient(grad)
    squares = grad.double().square()

    torch.testing.assert_close(rows.gradients, squares.flatten(1).sum(1).float() if grad.dim() > 1 else squares.float())
    torch.testing.assert_close(whole.gradients, squares.sum().float())
    assert unwatched.gradients is None


def test_the_variance_is_that_of_the_gradient_of_a_linear_layer():
    """Noise of variance ``range**2 / 4`` in each input, the most that 1 bit leaves, is put in and seen come out."""
    torch.manual_seed(0)
    x, grad, spread = torch.randn(50, 8), torch.randn(50, 6), 3.0
    site = SiteState("", 2, watched=True, factor=nn.Linear(8, 6).weight[0].numel() / 4)
    site.begin(x)
    site.ranges = torch.tensor(x.numel() * spread**2)  # groups of one element, all of this range
    site.see_gradient(grad)
    noise = spread * (torch.randint(0, 2, (4000, 50, 8)) - 0.5)
    found = (grad.t() @ noise).square().sum((1, 2)).mean()

    assert float(variance(site)) == pytest.approx(float(found), rel=0.03)


def test_a_place_with_a_history_asks_for_ids_and_does_without():
    samplegradients._warn_once.cache_clear()
    site = SiteState("", 2, per_sample=True, sample_gradients=SampleGradients())
    with pytest.warns(UserWarning, match="call actbench.samples"):
        site.begin(torch.empty(3, 4))
    site.watched, site.ranges = True, torch.tensor([1.0, 2.0, 3.0])
    site.see_gradient(torch.tensor([[9.0], [0.0], [0.0]]))

    assert float(variance(site)) == 0.25 * (1 + 2 + 3) * 81 / 12
