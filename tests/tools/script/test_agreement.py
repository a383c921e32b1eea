"""What is simulated against the truth: scripts that run for real on the CPU, and what ``actbench measure`` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, SCRIPTS, ScriptCase
from pairs import BATCH, COMPARED, MORE, NANOGPT, PLAIN

HERE = Path(__file__).parent
PROFILE = "rtx-4090"


def peak(words: list[str], folder: Path) -> int:
    """Run actbench in a folder and return the peak in bytes."""
    file = folder / "found.json"
    command = [sys.executable, "-m", "actbench", *words[:1], "--export-json", str(file), *words[1:]]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # each thread of an operator has buffers of its own
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return int(found[-1]["outcome"]["peak_bytes"])  # under its scheme


def check_on_the_cpu(case: ScriptCase, command: Any, tmp_path: Path) -> None:
    words = [*command(case, "tiny"), *MORE.get(case.name, "").split()]
    real = peak(["run", "--meter", "cpu", "--quiet", *words], tmp_path)
    simulated = peak(["run", "--device-profile", "cpu", "--quiet", *words], tmp_path)

    assert simulated == pytest.approx(real, rel=0.02 if case.convolutional else 0.005)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [each for each in CASES if each.name in COMPARED], ids=attrgetter("name"))
def test_each_script_needs_what_it_needs_for_real(case: ScriptCase, command: Any, tmp_path: Path) -> None:
    check_on_the_cpu(case, command, tmp_path)


def measured(function: str, folder: Path, *options: str) -> int:
    words = ["measure", f"{HERE / 'pairs.py'}:{function}", "--batch-size", str(BATCH), *options]
    return peak([*words, "--meter", "simulated", "--device-profile", PROFILE], folder)


@pytest.mark.slow
def test_a_plain_script_needs_to_the_byte_what_measure_says(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)

    simulated = peak(["run", "--device-profile", PROFILE, "--quiet", str(script)], tmp_path)

    assert simulated == measured("plain", tmp_path)


@pytest.mark.exhaustive
def test_a_script_with_a_gradient_scaler_needs_a_few_scalars_more(tmp_path: Path) -> None:
    """At the peak, in the backward pass of the cross entropy, five blocks of 512 bytes are there more.

    They are the scale, its growth, the norm of the clipped gradients of the step before, the scaled loss and the
    gradient of the loss, which is a product by the scale.
    """
    words = [str(SCRIPTS / "nanogpt.py"), *NANOGPT.split()]

    simulated = peak(["run", "--device-profile", PROFILE, "--quiet", *words], tmp_path)

    assert simulated == measured("nanogpt", tmp_path, "--autocast", "fp16") + 5 * 512


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama_peft", "trainer"])
def test_a_script_of_a_shipped_model_needs_what_measure_says(name: str, command: Any, tmp_path: Path) -> None:
    """Less than a part in a million is not equal: batches that are held, and scalars of the step before."""
    case = next(each for each in CASES if each.name == name)
    words = ["measure", *case.measured_as.split(), "--meter", "simulated", "--device-profile", PROFILE]

    simulated = peak(["run", "--device-profile", PROFILE, "--quiet", *command(case, "real")], tmp_path)

    assert simulated == pytest.approx(peak(words, tmp_path), rel=1e-6)
