from __future__ import annotations

from collections.abc import Iterator

import pytest

from actbench.measuring import processgroup


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    with processgroup.leave_fake_group():
        yield
