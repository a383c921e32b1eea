from __future__ import annotations

from collections.abc import Iterator

import pytest

from actbench.measuring import world


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    with world.leave_fake_group():
        yield
