"""Scripts that train nothing, such as one that generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.model.scripts import Script

WRITES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to("cuda").eval()
    ids = torch.full((4, 32), 3, device="cuda")
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)


main()
"""

NO_MODEL = """
import torch

print(torch.ones(1000, device="cuda").sum())
"""


def measured(
    text: str, tmp_path: Path, outcome: Callable[[Case], Measurement | Failure], meter: str
) -> Measurement | Failure:
    file = tmp_path / "write.py"
    file.write_text(text)
    script, profile = Script(target=str(file)), "cpu" if meter == "simulated" else None
    case = {"model": "write.py", "batch_size": 1, "meter": meter, "script": script, "device_profile": profile}
    return outcome(Case.model_validate(case))


def test_a_script_that_generates_needs_as_much_as_for_real(
    tmp_path: Path, outcome: Callable[[Case], Measurement | Failure]
) -> None:
    real, simulated = (measured(WRITES, tmp_path, outcome, meter) for meter in ("cpu", "simulated"))

    assert isinstance(real, Measurement)
    assert isinstance(simulated, Measurement)
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    assert simulated.weights_bytes == real.weights_bytes > 0
    assert simulated.peak_phase == real.peak_phase == "generation"
    assert simulated.optimizer is None
    assert simulated.peak_parts is not None
    assert simulated.peak_parts.weights_bytes == simulated.weights_bytes
    assert simulated.peak_parts.cache_bytes >= 4 * 2 * 2 * 2 * 16 * 32 * 4


def test_a_script_without_a_model_is_refused(tmp_path: Path, outcome: Callable[[Case], Measurement | Failure]) -> None:
    found = measured(NO_MODEL, tmp_path, outcome, "simulated")

    assert isinstance(found, Failure)
    assert "no optimizer of torch has stepped" in found.message
