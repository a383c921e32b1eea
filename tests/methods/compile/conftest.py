from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def alone() -> Iterator[None]:
    """Compile without what other tests have compiled, and draw the same numbers in each test."""
    torch._dynamo.reset()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch._dynamo.reset()
