"""Rows of a simulated CPU say what its library computes in memory that nobody knows; rows of CUDA devices do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actbench.measuring.bench import Session
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.simulator.unmodelled import Unmodelled

OWN = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 8))
    return model, lambda n: {"x": torch.randn(n, 3, 8, 8)}, lambda model, batch: model(batch["x"]).square().mean()
"""
SAID = "oneDNN's buffers for {} are not known: on a CPU the peak may be higher than simulated"


def warned(folder: Path, *, meter: str = "simulated", profile: str | None = "cpu", scheme: str = "exact") -> list[str]:
    (folder / "own.py").write_text(OWN)
    case = {"model": f"{folder}/own.py:build", "batch_size": 4, "optimizer": "adamw", "meter": meter, "scheme": scheme}
    found = Session(Case.model_validate({**case, "device_profile": profile, "gradient_quality": False})).memory()
    return [reason for reason in found.approximate if "oneDNN" in reason]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["autocast", "pure"])
def test_half_types_on_a_cpu_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, scheme: str
) -> None:
    kinds = {torch.bfloat16: lambda: True, torch.float16: lambda: True}
    monkeypatch.setattr("actbench.simulator.unmodelled._SUPPORTED", kinds)

    named = f"convolutions in {dtype} and products in {dtype}"
    assert warned(tmp_path, scheme=f"{scheme}:{dtype}") == [SAID.format(named)]


def test_products_that_the_library_does_not_multiply_are_not_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("actbench.simulator.unmodelled._SUPPORTED", {torch.bfloat16: lambda: False})

    assert warned(tmp_path, scheme="pure:bfloat16") == [SAID.format("convolutions in bfloat16")]


@pytest.mark.parametrize("capability", ["DEFAULT", "SVE256"])
def test_a_processor_whose_layouts_are_unknown_is_named(tmp_path: Path, monkeypatch, capability: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    assert warned(tmp_path) == [SAID.format("convolutions on a processor without AVX2")]


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_what_is_modelled_is_not_named(tmp_path: Path, monkeypatch, capability: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    assert warned(tmp_path) == []


@pytest.mark.parametrize("scheme", ["exact", "pure:bfloat16"])
def test_nothing_is_named_for_cuda_devices_nor_where_the_cpu_is_measured(
    tmp_path: Path, monkeypatch, scheme: str
) -> None:
    assert warned(tmp_path, meter="cpu", profile=None, scheme=scheme) == []

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert warned(tmp_path, profile="a100-80gb", scheme=scheme) == []


def test_buffers_that_depend_on_values_are_named_and_those_of_transforms_are_known() -> None:
    found = Unmodelled(profiles.get("cpu"))
    x, transformed = torch.rand(4, 4), torch.rand(4, 3).to(torch.complex64)
    found.temporaries(torch.ops.aten._fft_c2r.default, (transformed, [1], 0, 4), x)
    assert found.reasons() == ()

    found.temporaries(torch.ops.aten.linalg_matrix_exp.default, (x,), x)
    found.temporaries(torch.ops.aten._fft_c2r.default, (transformed, [0, 1], 0, 4), x)

    said = "the buffers for linalg_matrix_exp are not known: on a CPU the peak may be higher than simulated"
    assert found.reasons() == (said,)
