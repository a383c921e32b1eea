"""Formulas of other tools, as they are written from their descriptions."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from actbench.model.records import Case

ROOT = Path(__file__).parents[2]
GIB = 2**30


@pytest.fixture(scope="module")
def formulas() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "memory_formulas.py"))


@pytest.fixture
def llama(formulas: dict[str, Any]) -> Any:
    """Return the shape of Llama-3.1-8B, whose linear layers have 6,979,321,856 parameters."""
    return formulas["Shape"](
        H=4096,
        L=32,
        V=128256,
        K=1024,
        M=14336,
        E=1,
        tied=False,
        length=2048,
        parameters=8030261248,
        largest=128256 * 4096,
        adam_bytes=0,
        dtype="bfloat16",
    )


def of(scheme: str, **more: Any) -> Case:
    return Case(**{"model": "llama-3.1-8b", "batch_size": 2, "scheme": scheme, "dtype": "bfloat16", **more})


def test_the_formula_of_unsloth_is_a_sum_of_its_parts(formulas: dict[str, Any], llama: Any) -> None:
    linear, others = 6979321856, 2 * 4096 * 32 + 2 * 128256 * 4096
    per_layer = 2 * 2048 * (4096 + 2 * 1024 + 2 + 2 * 14336) * 2 * 1.25
    adapters = 16 * 32 * ((4096 + 4096) + (4096 + 1024))
    whole, adapted, packed = (
        formulas["unsloth"](llama, formulas["Setting"].of(case), case)
        for case in (
            of("checkpoint"),
            of("lora:16,target=q_proj/v_proj"),
            of("qlora:16,target=q_proj/v_proj+checkpoint+accumulate:2", optimizer="adamw-fused"),
        )
    )

    assert whole == pytest.approx((linear + others) * (2 + 6 + 2) + 2.0 * per_layer)
    weights = (linear + others) * 2
    assert adapted == pytest.approx(weights + adapters * 8 + 0.15 * weights + 32 * per_layer)
    weights = linear * 2 / 3.2 + others * 2
    assert packed == pytest.approx(weights + adapters * 8 + per_layer / 2 * 2)


def test_the_formula_of_deepspeed_has_the_figure_of_its_documentation(formulas: dict[str, Any], llama: Any) -> None:
    small = llama._replace(parameters=60_506_624, largest=32128 * 512)
    case = of("fsdp:2+checkpoint")
    found = formulas["deepspeed"](small, formulas["Setting"].of(case)._replace(processes=1 + 1), case)

    assert found / GIB == pytest.approx(0.06 + 1.014 / 2, abs=0.005)


@pytest.mark.parametrize(
    ("formula", "scheme"),
    [("unsloth", "fsdp:2"), ("unsloth", "lora:8,target=c_attn"), ("deepspeed", "checkpoint"), ("accelerate", "lora:8")],
)
def test_what_a_formula_does_not_express_it_is_not_asked(
    formula: str, scheme: str, formulas: dict[str, Any], llama: Any
) -> None:
    case = of(scheme)

    assert formulas[formula](llama, formulas["Setting"].of(case), case) is None
