from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from actbench.tools.script.libraries.libraries import prepared
from actbench.tools.script.libraries.loggers import together


@pytest.fixture
def notes() -> Iterator[list[str]]:
    found: list[str] = []
    with prepared(found.append):
        yield found


def test_loggers_do_nothing_whatever_a_script_calls(notes: list[str], tmp_path: Path) -> None:
    import mlflow
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "log")) as writer:
        writer.add_scalar("loss", 1.0, 2)
    with mlflow.start_run(run_name="x") as run:
        mlflow.log_metrics({"loss": 1.0})
        assert str(run.info.run_id) == ""

    class Mine(SummaryWriter):  # type: ignore[misc]
        def twice(self) -> int:
            return 2

    assert Mine("somewhere").twice() == 2
    assert list(tmp_path.iterdir()) == []
    assert notes == [
        "mlflow is off: a simulated run logs nothing.",
        "torch.utils.tensorboard is off: a simulated run logs nothing.",
    ]
    assert together(["first", *notes, "last"]) == (
        *("first", "mlflow and torch.utils.tensorboard are off: a simulated run logs nothing.", "last"),
    )
    assert together(notes[:1]) == (notes[0],)


def test_loggers_that_only_a_library_imports_are_not_named(
    notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers import the loggers that they find, whether the script uses them or not."""
    for folder, name in (("site-packages", "a_library"), ("mine", "a_module")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text("import importlib, aim\nimportlib.import_module('comet_ml')\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))

    import_module("a_library")
    assert notes == []
    for name in ("aim", "comet_ml"):
        sys.modules.pop(name)
    import_module("a_module")

    assert notes == [f"{name} is off: a simulated run logs nothing." for name in ("aim", "comet_ml")]


def test_a_library_that_asks_for_a_logger_gets_the_true_answer(notes: list[str]) -> None:
    assert importlib.util.find_spec("swanlab") is None


def test_wandb_is_told_to_be_off() -> None:
    before = os.environ.get("WANDB_MODE")
    with prepared(print):
        assert os.environ["WANDB_MODE"] == "disabled"

    assert os.environ.get("WANDB_MODE") == before


def test_transformers_reports_to_nobody(notes: list[str], tmp_path: Path) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(tmp_path), report_to=["wandb", "tensorboard"], use_cpu=True)

    assert arguments.report_to == []
    assert notes == ["TrainingArguments.report_to=wandb, tensorboard is off: a simulated run logs nothing."]


def test_accelerate_tracks_nothing(notes: list[str]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="wandb")
    accelerator.init_trackers("project", config={"lr": 1})
    accelerator.log({"loss": 1.0})
    accelerator.get_tracker("wandb").log({"loss": 1.0})

    assert notes == ["Accelerator(log_with=wandb) is off: a simulated run logs nothing."]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_writes_no_logs(package: str, notes: list[str], tmp_path: Path) -> None:
    module: Any = pytest.importorskip(package)
    csv = import_module(f"{package}.loggers").CSVLogger(str(tmp_path))
    trainer = module.Trainer(logger=csv, accelerator="cpu", enable_checkpointing=False, default_root_dir=str(tmp_path))
    trainer.logger.experiment.add_image("x", None)

    Path(trainer.log_dir, "config.yaml").touch(exist_ok=False)  # as LightningCLI does
    assert trainer.log_dir == trainer.logger.log_dir
    assert list(tmp_path.iterdir()) == []
    assert notes == ["Trainer(logger=CSVLogger) is off: a simulated run logs nothing."]
