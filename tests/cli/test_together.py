"""Commands that several processes run which were launched together, by the entry point itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECOND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")


def actbench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "actbench", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("arguments", [("measure", "--help"), ("report", "nothing.jsonl")])
def test_the_first_process_alone_does_what_needs_one(arguments: tuple[str, ...]) -> None:
    second = actbench(*arguments, **SECOND)

    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")


def test_accelerates_lone_process_is_told_what_to_start() -> None:
    lone = actbench("measure", "resnet18", ACCELERATE_USE_CPU="True", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

    assert lone.returncode == 2
    assert "starts one process only" in lone.stderr


def launched(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *TORCHRUN, str(size), "-m", "actbench", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_what_is_wrong_is_told_once_and_ends_all() -> None:
    ended = launched(2, "measure", "tiny-gpt2", "-s", "fewbit:3", "--meter", "cpu")

    assert ended.returncode == 1  # torchrun's own; actbench leaves with 2
    assert ended.stderr.count("2 processes were launched, and every case here needs one") == 1
    assert "exitcode  : 2" in ended.stderr


MODELS = {"tiny-llama@num_hidden_layers=4": ("--sequence-length", "64"), "resnet-cifar": ()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_each_rank_needs_what_is_simulated_and_gradients_are_those_of_all_batches(model: str, tmp_path: Path) -> None:
    schemes = ["ddp:2", "zero1:2", "fsdp:2"]
    chosen = [word for scheme in schemes for word in ("-s", scheme)]
    common = ("measure", model, "-s", "exact", *chosen, "-b", "8", "--steps", "1", "--seconds", "0", *MODELS[model])
    real, simulated = tmp_path / "real.json", tmp_path / "simulated.json"
    ended = launched(2, *common, "--meter", "cpu", "--export-json", str(real))
    assert ended.returncode == 0, ended.stderr
    profile = ("--meter", "simulated", "--device-profile", "cpu")
    assert actbench(*common, *profile, "--export-json", str(simulated)).returncode == 0

    measured, said = outcomes(real), outcomes(simulated)
    for scheme in schemes:
        found = measured[scheme]
        assert len(found["rank_peak_bytes"]) == 2
        assert found["peak_bytes"] == max(found["rank_peak_bytes"])
        assert found["peak_bytes"] == pytest.approx(said[scheme]["peak_bytes"], rel=0.03), scheme
        for part in ("weights_bytes", "gradients_bytes"):
            assert found[part] == said[scheme][part], (scheme, part)
        assert found["gradient_error"] < 1e-5, scheme
    assert measured["exact"]["rank_peak_bytes"] == []


def outcomes(file: Path) -> dict[str, dict[str, object]]:
    return {record["case"]["scheme"]: record["outcome"] for record in json.loads(file.read_text())}
