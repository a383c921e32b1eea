"""GRPO of TRL: what its steps need with completions that transformers generates, with a reference model, and served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.model.scripts import Script

SCRIPT = Path(__file__).parents[3] / "examples" / "grpo.py"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--kl", "0.04"), ("--served",)], ids=["generated", "served"])
def test_steps_of_grpo_need_what_they_need_for_real(
    arguments: tuple[str, ...],
    tiny_llama: Path,
    outcome: Callable[[Case], Measurement | Failure],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("--model", str(tiny_llama), "--prompt", "16", "--completion", "12", "--batch", "8", "--group", "4")
    peaks = []
    for meter in ("cpu", "simulated"):
        script = Script(target=str(SCRIPT), arguments=(*sizes, *arguments), whole=True)
        profile = "cpu" if meter == "simulated" else None
        case = {"model": "grpo", "batch_size": 1, "meter": meter, "script": script, "device_profile": profile}
        found = outcome(Case.model_validate(case))
        assert isinstance(found, Measurement), found.message
        peaks.append(max(each.peak_bytes for each in found.events if "step" in each.part))

    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)
