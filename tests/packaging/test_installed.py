"""The package as it is installed does its work in a folder that is no clone; ``make wheel`` tries the wheel so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import actbench

ROOT = Path(__file__).parents[2]
_OF_A_WHEEL = pytest.mark.skipif("WHEEL" not in os.environ, reason="make wheel sets WHEEL: the package is a wheel")
SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4096, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, *arguments: str) -> str:
    """Return what a command prints in a folder; the clone is on no path of its process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}
    command = [sys.executable, "-m", "actbench", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@_OF_A_WHEEL
def test_the_package_is_a_wheel_and_src_is_away() -> None:
    distribution = metadata.distribution("actbench")
    source = json.loads(distribution.read_text("direct_url.json") or "{}")

    assert source["url"].endswith(".whl")
    assert ROOT / "src" not in Path(actbench.__file__).parents
    assert not [path for path in sys.path if Path(path).resolve() == ROOT / "src"]
    assert not [file for file in distribution.files or () if not Path(str(file.locate())).is_file()]


def test_the_licence_is_in_the_package() -> None:
    texts = [file for file in metadata.files("actbench") or () if file.name == "LICENSE"]
    assert [file.read_text() for file in texts] == [(ROOT / "LICENSE").read_text()]


@pytest.mark.parametrize("name", ["kernels", "recipes"])
def test_files_at_the_top_of_the_repository_are_in_the_package(name: str) -> None:
    expected = {file.name: file.read_bytes() for file in (ROOT / name).iterdir() if file.is_file()}
    found = {each.name: each.read_bytes() for each in resources.files(f"actbench.{name}").iterdir() if each.is_file()}
    assert found == expected


@pytest.mark.slow
@_OF_A_WHEEL
def test_a_folder_that_is_no_clone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    swept = run(tmp_path, "sweep", "tiny-bert", "-s", "exact", "--meter", "simulated", "--output", "results")
    assert "1 measured, 0 failed" in swept
    assert "tiny-bert" in run(tmp_path, "report", "results")
    assert "train.py fits on t4" in run(tmp_path, "run", "--device-profile", "t4", "train.py")
    assert "Plan" in run(tmp_path, "fit", "tiny-bert", "--device-profile", "t4", "-s", "checkpoint")
