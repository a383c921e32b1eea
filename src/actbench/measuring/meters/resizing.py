"""Storages that Python code resizes, as FSDP2 does, of which no operator tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell of each storage that Python code resizes inside the block, which no operator does."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tell(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resized):
        yield
