"""Models that are looked up in a process of their own, within limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actbench.errors import MeasurementError, ModelError
from actbench.model.records import Case
from actbench.run.executor import BENCH
from actbench.run.processes import ForkServer
from actbench.run.sweep import looked_up_by

VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 8,
}


@pytest.fixture(scope="module")
def look_up() -> Iterator[Callable[[Case], object]]:
    with ForkServer(BENCH) as server:
        yield looked_up_by(server, 300)


@pytest.mark.slow
def test_a_config_that_fills_the_memory_does_so_in_another_process(
    look_up: Callable[[Case], object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**VIT, "image_size": 30_000}))

    with pytest.raises(MeasurementError, match=r"reading the model .* needs more memory than the 4\.00 GiB"):
        look_up(Case(model=str(tmp_path), batch_size=1))


@pytest.mark.slow
def test_an_error_comes_back_as_it_is_and_a_good_model_is_no_error(
    look_up: Callable[[Case], object], tmp_path: Path
) -> None:
    look_up(Case(model="tiny-bert", batch_size=1))
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        look_up(Case(model=str(tmp_path), batch_size=1))


@pytest.mark.slow
def test_a_users_file_that_ends_its_process_ends_not_the_command(
    look_up: Callable[[Case], object], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\nos._exit(0)\n")

    with pytest.raises(MeasurementError, match=r"its process ended by itself with exit code 0"):
        look_up(Case(model=f"{file}:build", batch_size=1))
