"""The tensors with storages inside others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from actbench.measuring.meters import footprint


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: torch.eye(6).to_sparse(), 6 * (2 * 8 + 4)),
        (lambda: torch.sparse_csr_tensor(torch.arange(7), torch.arange(6), torch.ones(6), (6, 6)), (7 + 6) * 8 + 6 * 4),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
            6 * 3 * 4 + 3 * 8,
        ),
    ],
    ids=["coo", "csr", "jagged"],
)
def test_all_parts_of_a_tensor_count(make: Callable[[], torch.Tensor], nbytes: int) -> None:
    assert footprint.stored_bytes([make()]) == nbytes
