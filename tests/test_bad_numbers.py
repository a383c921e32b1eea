"""Numbers that nothing can be computed with end in one message and status 2, wherever they are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import RecipeError, SpecError, StoreError, UsageError
from actbench.model.measured import MeasuredRecord
from actbench.report import store
from actbench.run import sweep
from actbench.run.recipes import Recipe
from actbench.scheme import build
from actbench.tools.train import comparison
from actbench.tools.train.recipe import TrainingRecipe
from actbench.units import parse_bytes
from actbench.workload import names

DIGITS, MORE_DIGITS = "9" * 400, "9" * 5000
FLAGS = {
    "--memory-limit": [f"{DIGITS}GiB", f"{MORE_DIGITS}GiB", f"{DIGITS}.5B", "9000000TiB"],
    "--seed": [str(2**64), str(2**63), MORE_DIGITS, "-1"],
    "--batch-size": [DIGITS, MORE_DIGITS, f"1-{MORE_DIGITS}*2", str(2**63)],
    "--sequence-length": [DIGITS, MORE_DIGITS, str(2**63)],
    "--image-size": [DIGITS, MORE_DIGITS],
    "--steps": [DIGITS, MORE_DIGITS],
    "--seconds": ["inf", "nan", "1e300"],
    "--timeout": ["inf", "nan", "1e300"],
}
OTHERS = {
    "jobs": (["sweep", "tiny-bert", "--jobs", DIGITS], "--jobs"),
    "seed of a conversion": (["convert", "tiny-bert", "-s", "fewbit:3", "--seed", str(2**64)], "--seed"),
    "batch of a conversion": (["convert", "tiny-bert", "-s", "fewbit:3", "--batch-size", str(2**64)], "--batch-size"),
    "images of a conversion": (["convert", "resnet18", "-s", "fewbit:3", "--image-size", str(2**64)], "--image-size"),
    "seeds of training": (["train", "--seeds", str(2**64)], "--seeds"),
    "range of seeds of training": (["train", "--seeds", f"0-{MORE_DIGITS}"], "--seeds"),
    "steps of training": (["train", "--steps", DIGITS], "--steps"),
    "time between checkpoints": (["train", "--checkpoint-seconds", "inf"], "--checkpoint-seconds"),
    "scale of a table": (["tables", "gelu", "--weight", "normal", "--scale", "inf"], "--scale"),
    "small scale of a table": (["tables", "gelu", "--weight", "normal", "--scale", "1e-320"], "--scale"),
    "large scale of a table": (["tables", "gelu", "--weight", "normal", "--scale", "1e300"], "--scale"),
    "narrow domain of a table": (["tables", "gelu", "--domain", "0", "1e-320"], "too narrow"),
    "far domain of a table": (["tables", "gelu", "--domain", "1e20", "1.0000000001e20"], "too narrow"),
    "parameter of a table": (["tables", "softplus", "--beta", "1e-320"], "softplus with beta"),
    "seed of encodings": (["encodings", "--seed", str(2**63)], "--seed"),
    "elements of encodings": (["encodings", "--elements", str(2**62)], "--elements"),
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object, **__: object) -> None:
        pytest.fail("work was begun")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "4000")
    monkeypatch.setattr(sweep.runner, "run_plan", work)
    monkeypatch.setattr(comparison.TrainingLoop, "_advance", work)


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in FLAGS.items() for value in values])
def test_a_flag_with_a_number_that_is_none_is_refused(cli: Any, tmp_path: Path, flag: str, value: str) -> None:
    message = cli.refused("measure", "tiny-bert", flag, value, naming=flag)

    assert len(re.sub("[─ ]+", " ", message)) < 1500
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(("arguments", "naming"), OTHERS.values(), ids=OTHERS)
def test_a_number_that_is_none_is_refused(cli: Any, tmp_path: Path, arguments: list[str], naming: str) -> None:
    cli.refused(*arguments, naming=naming)

    assert list(tmp_path.rglob("*")) == []


@pytest.mark.usefixtures("tasks_here")
@pytest.mark.parametrize("value", [str(2**63 - 1), "0"])
def test_the_ends_of_what_seeds_may_be_are_used(cli: Any, value: str) -> None:
    assert cli("measure", "tiny-bert", "--ledger", "--seed", value).status == 0
    assert (
        cli("encodings", "--elements", "64", "--encoding", "int:4", "--distribution", "relu", "--seed", value).status
        == 0
    )


@pytest.mark.parametrize(
    ("model", "value"),
    [
        *(("tiny-bert@hidden_size", value) for value in ("[" * 50_000, DIGITS, "-Infinity")),
        *(("tiny-vit@patch_size", value) for value in ('{"a":' * 50_000, MORE_DIGITS, "1e400")),
        *(("resnet-cifar@width", value) for value in (f"-{MORE_DIGITS}", "NaN")),
    ],
)
def test_a_setting_of_a_model_that_is_no_number_is_refused(refused_as_model: Any, model: str, value: str) -> None:
    assert max(map(len, refused_as_model(f"{model}={value}", naming="model settings"))) < 600


@pytest.mark.parametrize("text", ["1", "-1.5", "true", "null", "word", str(2**63 - 1), str(1 - 2**63), "0" * 30 + "x"])
def test_other_settings_are_read_as_before(text: str) -> None:
    (value,) = names.parse_model_name(f"tiny-bert@key={text}").changes.values()

    assert str(value).lower().replace("none", "null") == text


@pytest.mark.parametrize("value", ["1e-320", "5e-324", "1e-45", "1e40", "inf", "-inf", "nan", "1e400", DIGITS])
def test_a_number_of_a_scheme_that_32_bits_do_not_hold_is_refused(value: str) -> None:
    for spec in (f"fewbit:3,weight=normal,scale={value}", f"randomized:{value}", f"smaq,outliers={value}"):
        with pytest.raises(SpecError):
            build(spec)


@pytest.mark.parametrize(
    "spec", ["actnn:L3,adapt_interval", "gact:L1,samples", "checkpoint,every", "randomized:0.1,max"]
)
@pytest.mark.parametrize("value", [str(2**63), DIGITS, MORE_DIGITS])
def test_a_count_of_a_scheme_that_64_bits_do_not_hold_is_refused(spec: str, value: str) -> None:
    build(f"{spec}={2**63 - 1}")
    with pytest.raises(SpecError):
        build(f"{spec}={value}")


RECIPE = """
title = "t"
[workload]
model = "tiny-bert"
batch_size = {batch}
[measure]
seed = {seed}
min_seconds = {seconds}
memory_limit = {memory}
"""
TRAINING = """
title = "t"
[train]
model = "resnet-cifar"
data = "digits"
batch_size = 8
steps = 1
optimizer = "sgd"
learning_rate = {rate}
seeds = {seed}
"""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("batch", number) for number in (2**63, DIGITS)],
        *[("seed", number) for number in (2**63, 2**64, DIGITS, -1)],
        *[("seconds", number) for number in ("inf", "nan", "-inf", "1e300")],
        *[("memory", number) for number in (2**63, DIGITS, f'"{DIGITS}GiB"')],
    ],
)
def test_a_number_of_a_recipe_that_is_none_is_refused(tmp_path: Path, key: str, value: object) -> None:
    usual: dict[str, object] = {"batch": 8, "seed": 0, "seconds": 1.0, "memory": '"1GiB"'}
    (tmp_path / "mine.toml").write_text(RECIPE.format(**usual | {key: value}))

    with pytest.raises(RecipeError, match=key):
        Recipe.load(tmp_path / "mine.toml")


@pytest.mark.parametrize(("key", "value"), [("rate", "inf"), ("rate", "nan"), ("seed", 2**63), ("seed", DIGITS)])
def test_a_number_of_a_training_recipe_that_is_none_is_refused(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "mine.train.toml").write_text(TRAINING.format(**{"rate": 0.1, "seed": 0, key: value}))

    with pytest.raises(RecipeError, match=key):
        TrainingRecipe.load(tmp_path / "mine.train.toml")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("peak_bytes", value) for value in (str(2**64), f"-{2**64}", DIGITS, MORE_DIGITS)),
        *((field, str(2**64)) for field in ("weights_bytes", "activation_bytes")),
        *((field, MORE_DIGITS) for field in ("batch_size", "seed", "cores")),
    ],
)
def test_a_row_with_a_number_that_counts_nothing_is_refused_with_its_place(
    cli: Any, tmp_path: Path, make_record: Callable[..., MeasuredRecord], field: str, value: str
) -> None:
    line = re.sub(rf'"{field}":\d+', f'"{field}":{value}', make_record().model_dump_json(), count=1)
    (tmp_path / "x.jsonl").write_text(line + "\n")

    cli.refused("report", "x.jsonl", naming="x.jsonl:1: ")
    with pytest.raises(StoreError):
        store.read_results(tmp_path / "x.jsonl")


@pytest.mark.parametrize("text", [f"{DIGITS}GiB", f"{MORE_DIGITS}B", "8388608TiB"])
def test_more_memory_than_there_is_anywhere_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="more than 8 EiB"):
        parse_bytes(text)
    assert parse_bytes("8388607TiB") == 8388607 * 1024**4
