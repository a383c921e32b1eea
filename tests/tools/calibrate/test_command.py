"""The verb calibrate refuses before it measures, and writes what it found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench.simulator.profiles import DeviceTable, read_device_table
from actbench.tools.calibrate import calibrate as calibration

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no scheme."""
    monkeypatch.setattr(calibration, "calibrate", partial(calibration.calibrate, schemes=()))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_profile_and_exports_are_written(cli: Any, tmp_path: Path) -> None:
    profile, markdown, as_json = (tmp_path / name for name in ("here.toml", "table.md", "report.json"))

    ended = cli(
        *("calibrate", "--device", "cpu", "-v", "-o", profile),
        *("--export-markdown", markdown, "--export-json", as_json),
    )

    assert ended.status == 0, ended.err
    assert DeviceTable.model_validate_json(as_json.read_bytes()) == read_device_table(profile)
    rows = [line for line in markdown.read_text().splitlines() if line.startswith("| ")]
    kinds = {tuple(line.strip("| ").split(" | ")[:2]) for line in rows}
    assert {("matmul", "fp32"), ("convolution", "tf32"), ("elementwise", "bytes")} <= kinds
    assert "matmul" in ended.out
    assert "exact on tiny-roberta …" in ended.err
    assert f"--device-profile {profile}" in ended.err
    assert f"torch {torch.__version__}" in profile.read_text()


def test_a_file_that_is_there_stays_unless_it_is_forced(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("gib = 1\n")

    ended = cli("calibrate", "--device", "cpu", "-o", file)

    assert ended.status == 2
    assert f"{file} exists already: --force replaces it" in ended.err
    assert file.read_text() == "gib = 1\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "profile.json"), "a device profile is a .toml file; name one, such as profile.json.toml"),
        (("-o", "/proc/none/x.toml"), "cannot be written"),
        (("--budget", "0"), "--budget"),
        pytest.param(("--device", "cuda", "-o", "x.toml"), "torch finds no CUDA device here", marks=NO_GPU),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(cli: Any, arguments: tuple[str, ...], message: str) -> None:
    ended = cli("calibrate", *arguments)

    assert ended.status == 2
    assert message in ended.err
