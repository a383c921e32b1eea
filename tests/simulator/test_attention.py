from __future__ import annotations

import pytest
import torch

from actbench.simulator import profiles
from actbench.simulator.operators import choose

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32


def kernel(device: str, dtype: torch.dtype, width: int = 64, mask: bool = False, kv_heads: int = 4, **sizes) -> str:
    q = torch.empty(2, 4, sizes.get("rows", 16), width, dtype=dtype, device="meta")
    k = torch.empty(2, kv_heads, 16, width, dtype=dtype, device="meta")
    bias = torch.empty(2, 1, 16, 16, dtype=dtype, device="meta") if mask else None
    return choose(profiles.get(device), q, k, k, bias, sizes.get("is_causal", False))


@pytest.mark.parametrize(
    ("device", "dtype", "options", "expected"),
    [
        ("a100-40gb", HALF, {}, "flash"),
        ("a100-40gb", BRAIN, {}, "flash"),
        ("a100-40gb", BRAIN, {"mask": True}, "efficient"),
        ("a100-40gb", BRAIN, {"width": 264}, "efficient"),
        ("a100-40gb", BRAIN, {"width": 12}, "flash"),  # padded to 16
        ("a100-40gb", BRAIN, {"width": 12, "mask": True}, "math"),
        ("a100-40gb", BRAIN, {"kv_heads": 2}, "flash"),
        ("a100-40gb", BRAIN, {"rows": 8, "is_causal": True}, "efficient"),
        ("a100-40gb", FLOAT, {}, "efficient"),
        ("a100-40gb", FLOAT, {"mask": True}, "efficient"),
        ("a100-40gb", FLOAT, {"width": 12}, "efficient"),
        ("a100-40gb", FLOAT, {"width": 13}, "math"),
        ("a100-40gb", FLOAT, {"kv_heads": 2}, "math"),
        ("a100-40gb", torch.float64, {}, "math"),
        ("t4", HALF, {}, "efficient"),
        ("t4", BRAIN, {}, "math"),
        ("t4", FLOAT, {"width": 13}, "efficient"),
    ],
)
def test_the_kernel_is_the_one_cuda_picks(device, dtype, options, expected) -> None:
    assert kernel(device, dtype, **options) == expected


def test_operands_of_three_dimensions_go_to_math() -> None:
    q = torch.empty(2, 16, 64, device="meta")

    assert choose(profiles.get("a100-40gb"), q, q, q, None, False) == "math"
