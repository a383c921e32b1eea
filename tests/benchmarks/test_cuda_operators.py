"""benchmarks/cuda_operators.py on the CPU, with an allocator that says what it is told to."""

from __future__ import annotations

import json

import pytest
import torch

from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.simulator import profiles


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch, script) -> None:
    for name, answer in (("memory_allocated", 1000), ("max_memory_allocated", 6000), ("reset_peak_memory_stats", None)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(script, "CudaMeter", CpuMeter)
    monkeypatch.setattr(script, "profile_of_device", lambda: profiles.get("h200"))


@pytest.mark.slow
def test_every_operator_is_told_with_what_it_needs_beyond_its_result(
    script, allocator, monkeypatch, capsys, tmp_path
) -> None:
    file = tmp_path / "operators.json"
    monkeypatch.setattr(
        "sys.argv", ["cuda_operators.py", "tiny-roberta:2", "resnet18:2:actnn:L2", "--output", str(file)]
    )

    script.main()

    found = json.loads(file.read_text())
    assert list(found) == ["tiny-roberta:2", "resnet18:2:actnn:L2"]
    rows = {(row["operator"], row["phase"]): row for row in found["tiny-roberta:2"]}
    assert rows["aten._softmax_backward_data.default", "backward"]["extra_bytes"] == 5000
    assert rows["aten._softmax_backward_data.default", "backward"]["counted_bytes"] > 0
    assert rows["aten.addmm.default", "forward"]["calls"] >= 2
    assert any(row["operator"].startswith("actbench.") for row in found["resnet18:2:actnn:L2"])
    assert "aten.addmm.default | forward" in capsys.readouterr().out


def test_a_case_that_fails_is_told_and_the_others_run(script, allocator, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["cuda_operators.py", "tiny-roberta:2:dropit:2.0", "tiny-roberta:2"])

    script.main()

    out = capsys.readouterr().out
    assert "tiny-roberta:2:dropit:2.0: " in out
    assert "aten.addmm.default" in out
