"""Whatever a model's own code does, a command ends in one message and status 2, and a measured case in a failed row."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from actbench.measuring import bench
from actbench.model.records import Failure
from actbench.tools.train import comparison

BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
}
VIT = {**BERT, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8}
LONG = 200_000
LONGEST = 5000  # characters of all that a refused command says

SETTINGS = {
    "tiny-llama@num_key_value_heads=3": "training step of 'tiny-llama@num_key_value_heads=3' fails: RuntimeError",
    "tiny-vit@image_size=0": "doesn't match model (0*0)",
    "tiny-vit@patch_size=1000": "1000 x 1000",
    "tiny-vit@num_channels=0": "Expected 0 but got 3",
    "tiny-bert@num_labels=0": "tiny-bert@num_labels=0",
    "tiny-bert@max_position_embeddings=0": "128",
}
CONFIGS = {
    "chunks that do not fit": ({**BERT, "chunk_size_feed_forward": 3}, "chunk size 3"),
    "images of no size": ({**VIT, "image_size": [0, 0]}, "0 x 0 px"),
    "images of a negative size": ({**VIT, "image_size": -5}, "-5 x -5 px"),
    "a part that is none": ({**BERT, "text_config": {"a": 1}}, "cannot be read: AttributeError"),
    "a class that is a number": ({**BERT, "architectures": 3}, "architectures is not a list"),
}
FILE = """
import os, torch
from torch import nn

class Own(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")
    __repr__ = __str__

class Wordless(BaseException):
    def __str__(self):
        return 3

def build():
    {build}
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    def make_batch(n):
        {batch}
        return {{"x": torch.randn(n, 8)}}
    def loss(model, batch):
        {loss}
        return model(batch["x"]).sum()
    return model, make_batch, loss
"""
STATEMENTS = {
    "raise Own('of its own')": "Own: of its own",
    "raise Mute": "Mute: its message cannot be read (RuntimeError)",
    "raise Wordless": "Wordless: its message cannot be read (TypeError)",
    f"raise ValueError('x' * {LONG})": f"x…({LONG - 400:,} more)…x",
    "raise ValueError('half of a \\udcff pair')": "half of a \\udcff pair",
    "raise SystemExit(0)": "SystemExit: 0",
    "raise StopIteration": "StopIteration",
    "raise GeneratorExit": "GeneratorExit",
    "raise KeyError": "KeyError",
    "raise KeyError([])": "KeyError: []",
    "raise MemoryError": "MemoryError",
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.sampled(fast=3, slow=2)
@pytest.mark.parametrize(("model", "naming"), SETTINGS.items())
def test_settings_that_a_model_cannot_run_with_are_refused(refused_as_model: Any, model: str, naming: str) -> None:
    refused_as_model(model, naming=naming, scheme="fewbit:3")


@pytest.mark.parametrize(("config", "naming"), CONFIGS.values(), ids=CONFIGS)
def test_a_folder_whose_config_makes_no_model_is_refused(
    refused_as_model: Any, tmp_path: Path, config: dict[str, Any], naming: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    refused_as_model("./model", naming=naming)


PLACES = ("build", "batch", "loss")


@pytest.mark.parametrize(
    ("place", "statement"),
    [
        *((place, next(iter(STATEMENTS))) for place in PLACES),
        *((PLACES[number % 3], statement) for number, statement in enumerate(STATEMENTS) if number),
    ],
    ids=lambda text: text[:20],
)
def test_what_a_file_raises_is_one_message(refused_as_model: Any, tmp_path: Path, place: str, statement: str) -> None:
    parts = dict.fromkeys(("build", "batch", "loss"), "pass") | {place: statement}
    (tmp_path / "own.py").write_text(FILE.format(**parts))

    assert max(map(len, refused_as_model("own.py:build", naming=STATEMENTS[statement]))) < LONGEST


def test_a_file_that_raises_while_it_is_read_is_one_message(cli: Any, refused_as_model: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own(BaseException): pass\nraise Own('at once')\ndef build(): pass\n")

    refused_as_model("own.py:build", naming="own.py:2: Own: at once")
    cli.refused("tables", "own.py:Own", naming="Own: at once")
    cli.refused("measure", "own.py:Own", naming="own.py:2: Own: at once")


def test_a_batch_without_what_the_model_asks_for_is_named(refused_as_model: Any, tmp_path: Path) -> None:
    loss = "return model(dict(batch)['images']).sum()"
    (tmp_path / "own.py").write_text(FILE.format(build="pass", batch="pass", loss=loss))

    refused_as_model("own.py:build", naming="the loss asks the batch for 'images', and make_batch gives 'x'")


@pytest.mark.parametrize(("statement", "naming"), STATEMENTS.items(), ids=lambda text: text[:20])
def test_whatever_a_case_raises_becomes_a_row_that_can_be_written(statement: str, naming: str) -> None:
    names: dict[str, Any] = {}
    exec(FILE.format(build=statement, batch="pass", loss="pass"), names)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        names["build"]()

    failure = bench.failure_of(raised.value)

    assert naming in failure.message
    assert Failure.model_validate_json(failure.model_dump_json()) == failure


class Leave(BaseException):
    """No ordinary exception."""


def test_what_a_training_run_raises_is_a_failed_run(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object) -> float:
        raise Leave("in the middle")

    monkeypatch.setattr(comparison.TrainingLoop, "_advance", leave)

    ended = cli("train", "digits", "-s", "exact", "--steps", "1", "--seeds", "0")

    assert ended.status == 1
    assert "the run fails: Leave: in the middle" in ended.out, ended
    assert "Traceback" not in ended.err


def test_what_a_model_raises_before_training_is_one_message(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object) -> None:
        raise Leave("at the first look")

    monkeypatch.setattr(comparison.TrainingLoop, "check", leave)

    cli.refused("train", "digits", "-s", "exact", "--steps", "1", naming="cannot be trained: Leave: at the first look")


def test_an_end_in_the_middle_is_noticed(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda status: ends.append(status) or sys.exit("stands for the end"))
    monkeypatch.setattr(comparison.TrainingLoop, "check", lambda *_: os._exit(0))

    ended = cli("train", "digits", "-s", "exact", "--steps", "1")

    assert set(ends) == {2}
    assert f"{__file__}:" in ended.err
    assert "called os._exit(0)" in ended.err


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("statement", "seconds", "naming"),
    [
        ("print('now'); os._exit(0)", 60, "its process ended by itself with exit code 0"),
        ("import time; time.sleep(60)", 2, "took longer than --timeout 2 s and was stopped"),
    ],
)
def test_a_listing_whose_model_ends_its_process_or_hangs_is_one_message(
    cli: Any, tmp_path: Path, statement: str, seconds: int, naming: str
) -> None:
    (tmp_path / "own.py").write_text(FILE.format(build="pass", batch="pass", loss=statement))

    message = cli.refused("measure", "own.py:build", "--ledger", "--timeout", seconds, naming=naming)

    assert "listing what 'own.py:build' keeps for backward" in message
