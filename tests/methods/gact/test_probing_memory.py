"""The pass that allocates bits needs memory of its own, which no figure of a step counts."""

from __future__ import annotations

import torch
from torch import nn

import actbench
from actbench.measuring.meters.trace import AllocationTrace

WIDTH = 512


def peaks(batch: int, scheme: str) -> list[int]:
    """Return the most bytes of the first two steps, beyond the weights and the batch."""
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    actbench.convert(net, scheme)
    x, found = torch.rand(batch, WIDTH), []
    for _ in range(2):
        with AllocationTrace() as trace:
            trace.mark("begin")
            net(x).square().mean().backward()
            trace.mark("end")
        found.append(trace.peak_bytes("begin", "end") - trace.live_bytes("begin"))
        net.zero_grad()
    return found


def test_the_pass_that_allocates_bits_holds_two_sets_of_gradients_and_a_difference() -> None:
    """No meter counts it: all read a step between two such passes. It needs more than a step of few rows."""
    gradients, largest = 4 * 4 * (WIDTH**2 + WIDTH), 4 * WIDTH**2
    (allocating, step), (fixed, _) = peaks(64, "gact:L2"), peaks(64, "gact:L1")

    assert step == fixed  # as simulated
    assert allocating > 2 * step
    assert 0 <= allocating - 2 * gradients - 2 * largest < 0.02 * gradients  # the difference, and its square


def test_a_step_of_many_rows_needs_more_than_the_pass_that_allocates_its_bits() -> None:
    allocating, step = peaks(4096, "gact:L2")

    assert allocating == step
