"""Bad input ends in one clear message and status 2, with no traceback, and nothing is overwritten or lost."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench.model.measured import MeasuredRecord
from actbench.report.store import Store
from actbench.run import runner

RECIPE = """
title = "t"
[workload]
model = "tiny-roberta"
batch_size = 2
[[scheme]]
spec = "exact"
"""

WRONG_FLAGS = {
    "unknown verb": (["swep"], "swep"),
    "unknown flag": (["sweep", "--bathc-size", "8"], "--bathc-size"),
    "unknown model": (["measure", "robrta-base"], "roberta-base"),
    "unknown torchvision model": (["measure", "torchvision:resnet51"], "resnet50"),
    "model for optical flow": (["measure", "torchvision:raft_small"], "is an optical flow model"),
    "unknown configuration key": (["measure", "tiny-roberta@num_layerz=2"], "num_layerz"),
    "unknown scheme": (["measure", "tiny-roberta", "-s", "fewbti:3"], "fewbit"),
    "unknown key of a scheme": (["measure", "tiny-roberta", "-s", "fewbit:3,bitz=2"], "bitz"),
    "bits 0": (["measure", "tiny-roberta", "-s", "fewbit:0"], "bits"),
    "bits 9": (["measure", "tiny-roberta", "-s", "fewbit:9"], "bits"),
    "bits 2.5": (["measure", "tiny-roberta", "-s", "fewbit:2.5"], "2.5"),
    "bits of the short form": (["convert", "tiny-roberta", "--gelu-bits", "9", "--dry-run"], "9"),
    "unknown function": (["measure", "tiny-roberta", "-s", "fewbit:3,functions=gello"], "gello"),
    "ratio 0": (["measure", "tiny-roberta", "-s", "randomized:0"], "ratio"),
    "ratio -1": (["measure", "tiny-roberta", "-s", "randomized:-1"], "ratio"),
    "ratio 2": (["measure", "tiny-roberta", "-s", "randomized:2"], "ratio"),
    "ratio nan": (["measure", "tiny-roberta", "-s", "randomized:nan"], "ratio"),
    "unknown sketch": (["measure", "tiny-roberta", "-s", "randomized:0.5,sketch=gauss"], "sketch"),
    "scheme twice": (["measure", "tiny-roberta", "-s", "fewbit:3+fewbit:2"], "twice"),
    "exact composed": (["measure", "tiny-roberta", "-s", "exact+fewbit:2"], "exact"),
    "one scheme written in two ways": (
        ["sweep", "tiny-roberta", "-s", "fewbit:3+checkpoint", "-s", "checkpoint+fewbit:3"],
        "fewbit:3",
    ),
    "schemes that exclude each other": (
        ["measure", "tiny-roberta", "-s", "gact+offload"],
        "--scheme: scheme 'gact+offload': gact and offload both",
    ),
    "short forms that exclude each other": (
        ["measure", "tiny-roberta", "--gelu-bits", "3", "--linear", "regelu2"],
        "--gelu-bits and --linear: scheme 'fewbit:3,functions=gelu+regelu2'",
    ),
    "schemes that exclude each other, to convert": (["convert", "tiny-roberta", "-s", "smaq+offload"], "--scheme: "),
    "schemes that exclude each other, to train": (["train", "-s", "gact+offload"], "--scheme: scheme 'gact+offload'"),
    "empty scheme": (["measure", "tiny-roberta", "-s", ""], "empty"),
    "nothing after the colon": (["measure", "tiny-roberta", "-s", "fewbit:"], "colon"),
    "value where none is taken": (["measure", "tiny-roberta", "-s", "exact:3"], "exact"),
    "batch 0": (["measure", "tiny-roberta", "-b", "0"], "--batch-size"),
    "batch range backwards": (["measure", "tiny-roberta", "-b", "32-8*2"], "--batch-size"),
    "batch range without end": (["measure", "tiny-roberta", "-b", "8-64*1"], "--batch-size"),
    "sequence too long": (["measure", "tiny-roberta", "--sequence-length", "100000"], "100000"),
    "memory without a unit that exists": (["measure", "tiny-roberta", "--memory-limit", "16GiBs"], "16GiBs"),
    "memory of nothing": (["measure", "tiny-roberta", "--memory-limit", "0"], "0"),
    "unknown meter": (["measure", "tiny-roberta", "--meter", "gpu"], "gpu"),
    "unknown device": (["measure", "tiny-roberta", "--device-profile", "a10000"], "a10000"),
    "unknown dtype": (["measure", "tiny-roberta", "--dtype", "float8"], "float8"),
    "task of another kind": (["measure", "resnet18", "--task", "causal-lm"], "causal-lm"),
    "recipe of the other verb, to train": (["train", "quickstart"], "run 'actbench sweep quickstart'"),
    "recipe of the other verb, to sweep": (["sweep", "digits"], "run 'actbench train digits'"),
    "seeds of training": (["train", "--seeds", "x"], "command line: --seeds: seeds 'x'"),
    "unknown recipe": (["sweep", "nothing.toml"], "nothing.toml"),
    "limit that is none": (["compare", "a.jsonl", "b.jsonl", "--fail-on", "peak"], "peak"),
    "no results": (["report", "nothing.jsonl"], "nothing.jsonl"),
    "unknown scheme to show": (["schemes", "fewbitt"], "fewbit"),
    "no scheme to convert with": (["convert", "tiny-roberta"], "--scheme"),
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "400")


def refused(cli: Any, *arguments: object, naming: str) -> str:
    """Run a command that must be refused, and return its message."""
    ended = cli(*arguments)

    assert ended.status == 2
    assert "Traceback" not in ended.err
    assert naming in ended.err
    return ended.err


@pytest.mark.usefixtures("looked_up_here")
@pytest.mark.parametrize(("arguments", "naming"), WRONG_FLAGS.values(), ids=WRONG_FLAGS)
def test_a_wrong_flag_is_named(cli: Any, tmp_path: Path, arguments: list[str], naming: str) -> None:
    refused(cli, *arguments, naming=naming)

    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("verb", ["measure", "sweep"])
@pytest.mark.parametrize("meters", ["cuda", "simulated,cuda"])
def test_a_meter_without_its_device_is_refused_before_any_work(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, meters: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runner, "run_plan", lambda *_, **__: pytest.fail("a case was run"))

    refused(cli, verb, "tiny-roberta", "-m", meters, naming="--meter cuda")

    assert list(tmp_path.rglob("*")) == []


BROKEN_RECIPES = {
    "no TOML": ("title = \n", "line 1"),
    "unknown key": (RECIPE + "colour = 3\n", "colour"),
    "bits of the wrong kind": (RECIPE.replace("exact", "fewbit:x"), "fewbit"),
    "batch of text": (RECIPE.replace("batch_size = 2", 'batch_size = "many"'), "batch_size"),
    "no model": (RECIPE.replace('model = "tiny-roberta"', ""), "model"),
    "meter that does not exist": (RECIPE + '[measure]\nmeters = ["gpu"]\n', "gpu"),
    "not text": ("\udcff", "UTF-8"),
}


@pytest.mark.parametrize(("text", "naming"), BROKEN_RECIPES.values(), ids=BROKEN_RECIPES)
def test_a_broken_recipe_is_refused_with_the_place(cli: Any, tmp_path: Path, text: str, naming: str) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_bytes(text.encode("utf-8", "surrogateescape"))

    message = refused(cli, "sweep", recipe, naming=naming)

    assert "mine.toml" in message


BROKEN_RESULTS = {
    "truncated in the middle": lambda lines: [lines[0][: len(lines[0]) // 2], lines[1]],
    "not JSON": lambda lines: ["hello", *lines],
    "future version": lambda lines: [lines[0].replace('"schema_version":1', '"schema_version":99'), lines[1]],
    "unknown field": lambda lines: [lines[0].replace('"recipe"', '"recipes"', 1), lines[1]],
}


@pytest.mark.usefixtures("looked_up_here")
@pytest.mark.parametrize("break_it", BROKEN_RESULTS.values(), ids=BROKEN_RESULTS)
@pytest.mark.parametrize("verb", ["report", "sweep"])
def test_a_broken_results_file_is_refused_and_left_alone(
    cli: Any,
    tmp_path: Path,
    make_record: Callable[..., MeasuredRecord],
    break_it: Callable[[list[str]], list[str]],
    verb: str,
) -> None:
    file = tmp_path / "results.jsonl"
    lines = break_it([make_record(scheme).model_dump_json() for scheme in ("exact", "checkpoint")])
    file.write_text("\n".join(lines) + "\n")
    before = file.read_bytes()
    arguments = ["report", file] if verb == "report" else ["sweep", "tiny-roberta", "-o", file]

    refused(cli, *arguments, naming=f"{file}:")

    assert file.read_bytes() == before


@pytest.mark.usefixtures("looked_up_here")
def test_a_second_sweep_on_one_file_is_refused(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with Store.opened(file, MeasuredRecord):
        refused(cli, "sweep", "tiny-roberta", "-o", file, naming="another actbench process")


@pytest.mark.usefixtures("looked_up_here")
def test_a_file_that_is_no_results_file_is_not_written_to(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text("my notes\n")

    refused(cli, "sweep", "tiny-roberta", "-o", file, naming="notes.jsonl")

    assert file.read_text() == "my notes\n"


@pytest.mark.usefixtures("looked_up_here")
def test_an_output_below_a_file_is_refused(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")

    refused(cli, "sweep", "tiny-roberta", "-o", tmp_path / "taken" / "here", naming="taken")


def test_an_export_onto_a_folder_is_refused(
    cli: Any, tmp_path: Path, make_record: Callable[..., MeasuredRecord]
) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(make_record().model_dump_json() + "\n")

    refused(cli, "report", file, "--export-csv", tmp_path, naming="folder")


def test_two_exports_onto_one_file_are_refused(
    cli: Any, tmp_path: Path, make_record: Callable[..., MeasuredRecord]
) -> None:
    file, target = tmp_path / "results.jsonl", tmp_path / "table"
    file.write_text(make_record().model_dump_json() + "\n")

    refused(cli, "report", file, "--export-csv", target, "--export-markdown", target, naming="same file")

    assert not target.exists()


@pytest.mark.parametrize(
    ("verb", "other"),
    [
        (("measure", "tiny-roberta"), "--export-markdown"),
        (("measure", "tiny-roberta"), "--export-timeline"),
        (("fit", "tiny-roberta", "--device-profile", "rtx-4090"), "--export-json"),
        (("train", "digits"), "--export-curves"),
    ],
)
def test_two_exports_onto_one_file_are_refused_before_anything_runs(
    cli: Any, verb: tuple[str, ...], other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    said = refused(cli, *verb, "--html", "x.html", other, tmp_path / "x.html", naming="same file")

    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_pickle_in_place_of_a_model_folder_is_refused(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": 1}))

    refused(cli, "convert", "./model", "-s", "fewbit:3", naming="pytorch_model.bin")


@pytest.mark.usefixtures("looked_up_here")
@pytest.mark.parametrize("content", ["", "{", '{"model_type": "no-such-model"}', "[]"])
def test_a_broken_model_folder_is_refused(cli: Any, tmp_path: Path, content: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(content)

    refused(cli, "measure", "./model", naming="config.json")


def test_a_file_without_the_function_is_refused(cli: Any, tmp_path: Path) -> None:
    """It is read in a process of its own, as all models are outside of these tests."""
    (tmp_path / "mine.py").write_text("x = 1\n")

    refused(cli, "measure", "mine.py:build", naming="build")


@pytest.mark.slow
def test_a_model_folder_that_is_taken_is_not_overwritten(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")

    refused(cli, "convert", "tiny-roberta", "-s", "fewbit:3", "-o", folder, "--force", naming="mine")

    assert (folder / "thesis.txt").read_text() == "years of work"


@pytest.mark.exhaustive
def test_a_scheme_that_finds_nothing_is_refused(cli: Any) -> None:
    refused(cli, "convert", "resnet18", "-s", "fewbit:3,functions=gelu", "--dry-run", naming="ReLU")


@pytest.mark.exhaustive
def test_a_memory_limit_below_the_weights_is_a_row_over_its_limit(cli: Any, tmp_path: Path) -> None:
    command = (
        "measure",
        "tiny-roberta",
        "--meter",
        "simulated",
        "--memory-limit",
        "100KiB",
        "-o",
        tmp_path / "r.jsonl",
    )
    ended, strict = cli(*command), cli(*command, "--require-fit")

    assert (ended.status, strict.status) == (0, 1)
    assert "Traceback" not in ended.err
    assert (ended.out + ended.err).count("over the limit of 100.00 KiB by") == 1
    assert '"reason":"out-of-memory"' not in (tmp_path / "r.jsonl").read_text()
    assert '"over_limit_bytes":' in (tmp_path / "r.jsonl").read_text()
