"""Models that transformers runs by reference code say so beside every figure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actbench import workload as workloads
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.simulator.overrides import missing_kernels


def test_a_mamba_without_its_kernels_is_measured_with_a_warning(write_config: Callable[..., Path]) -> None:
    folder = write_config("MambaForCausalLM")
    warned = measure(Case(model=str(folder), batch_size=1, sequence_length=4)).warnings

    assert len(warned) == 1
    assert "MambaForCausalLM by slow reference code (causal-conv1d and mamba-ssm cannot be imported here)" in warned[0]


def test_other_kernels_are_named_too_and_models_without_any_say_nothing(write_config: Callable[..., Path]) -> None:
    qwen = write_config("Qwen3NextForCausalLM")

    assert _missing(str(qwen)) == ("causal-conv1d", "flash-linear-attention")
    assert _missing("tiny-gpt2") == _missing("tiny-bert") == ()


def test_the_flag_of_earlier_versions_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = workloads.load_workload(Case(model="tiny-gpt2", batch_size=1)).setup(materialize=False, seed=0).module
    place: Any = sys.modules[type(module).__module__]
    monkeypatch.setattr(place, "is_fast_path_available", False, raising=False)

    assert missing_kernels(module) == ("the packages of its fast path",)


def _missing(model: str) -> tuple[str, ...]:
    return missing_kernels(
        workloads.load_workload(Case(model=model, batch_size=1)).setup(materialize=False, seed=0).module
    )
