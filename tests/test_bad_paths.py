"""Names and places that are none end in one message and status 2, before any work is done for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import StoreError
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
from actbench.run import sweep
from actbench.tools.convert.workload import convert_workload
from actbench.tools.train import comparison

TOO_LONG = "a" * 256
MODELS = {
    "two hyphens": ("org/my--model", "is not a name on the hub"),
    "a dot at the end": ("hf:org/name.", "is not a name on the hub"),
    "a hyphen at the beginning": ("hf:-x/y", "is not a name on the hub"),
    "longer than the hub's": ("hf:org/" + "n" * 97, "is not a name on the hub"),
    "nobody": ("~nobodyhere", "there is no user '~nobodyhere'"),
    "a folder of nobody's": ("~nobodyhere/x", "there is no user '~nobodyhere'"),
    "a file of nobody's": ("~nobodyhere/m.py:build", "there is no user '~nobodyhere'"),
    "a long name": (TOO_LONG, "there is no model"),
    "a long folder": (f"./{TOO_LONG}", "there is no such folder"),
    "a long file": (f"{TOO_LONG}.py:build", "there is no file"),
    "a long name on the hub": (f"{TOO_LONG}/b", "is not a name on the hub"),
    "a long path": ("a/" * 3000, "is not a name on the hub"),
    "long settings": (f"x@{TOO_LONG}", "is not a new key=value"),
}
PLACES = {
    "recipe of a long name": (["sweep", f"{TOO_LONG}.toml"], "File name too long"),
    "training recipe of a long name": (["train", TOO_LONG], "there is no recipe"),
    "training recipe in a file of a long name": (["train", f"{TOO_LONG}.toml"], "File name too long"),
    "results of a long name": (["report", TOO_LONG], "File name too long"),
    "compared results of a long name": (["compare", TOO_LONG, TOO_LONG], "File name too long"),
    "output of a long name": (["measure", "tiny-bert", "-o", TOO_LONG], "File name too long"),
    "output in a file of a long name": (["sweep", "tiny-bert", "-o", f"{TOO_LONG}.jsonl"], "File name too long"),
    "output in a folder of a long name": (["sweep", "tiny-bert", "-o", f"{TOO_LONG}/x.jsonl"], "File name too long"),
    "training output of a long name": (["train", "-o", TOO_LONG], "File name too long"),
    "export of a long name": (["sweep", "tiny-bert", "--export-csv", TOO_LONG], "File name too long"),
    "curves of a long name": (["train", "--export-curves", f"{TOO_LONG}.png"], "File name too long"),
    "functions of nobody's": (
        ["measure", "tiny-bert", "-s", "fewbit:3,functions=~nobodyhere.py:f"],
        "there is no user",
    ),
    "table of nobody's": (["tables", "~nobodyhere/a.py:f"], "there is no user '~nobodyhere'"),
    "no model to convert": (["convert", "", "-s", "fewbit:3"], "MODEL"),
    "a blank model to convert": (["convert", " ", "-s", "fewbit:3"], "MODEL"),
    "no model to measure": (["measure", ""], "MODEL"),
    "no recipe": (["sweep", ""], "it is empty"),
    "no training recipe": (["train", ""], "it is empty"),
    "no results": (["report", ""], "it is empty"),
    "nothing to compare": (["compare", "", ""], "it is empty"),
    "no output": (["measure", "tiny-bert", "-o", ""], "--output"),
    "no output of a sweep": (["sweep", "-o", ""], "--output"),
    "no output of training": (["train", "-o", ""], "--output"),
    "no model folder": (["convert", "tiny-bert", "-s", "fewbit:3", "-o", ""], "--output"),
    "no export": (["sweep", "--export-csv", ""], "--export-csv"),
    "no curves": (["train", "--export-curves", ""], "--export-curves"),
    "no profile": (["measure", "tiny-bert", "--device-profile", ""], "--device-profile"),
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_up_here: None) -> None:
    def work(*_: object, **__: object) -> None:
        pytest.fail("work was begun")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sweep.runner, "run_plan", work)
    monkeypatch.setattr(comparison.TrainingLoop, "_advance", work)


@pytest.mark.parametrize(("model", "naming"), MODELS.values(), ids=MODELS)
def test_a_name_that_is_none_is_refused_as_a_model(
    cli: Any, refused_as_model: Any, tmp_path: Path, model: str, naming: str
) -> None:
    refused_as_model(model, naming=naming)
    cli.refused("sweep", model, naming=naming)

    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(("arguments", "naming"), PLACES.values(), ids=PLACES)
def test_a_place_that_is_none_is_refused(cli: Any, tmp_path: Path, arguments: list[str], naming: str) -> None:
    message = cli.refused(*arguments, naming=naming)

    assert len(message) < 4000
    assert list(tmp_path.rglob("*")) == []


def dead_link(path: Path) -> None:
    path.symlink_to("nowhere/at-all")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_a_folder(path: Path) -> None:
    path.with_name("folder").mkdir()
    path.symlink_to("folder")


def folder(path: Path) -> None:
    path.mkdir()


def below_no_folder(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("no folder")


TAKEN: list[Callable[[Path], None]] = [dead_link, circle, link_to_a_folder, folder, below_no_folder]


@pytest.mark.parametrize("take", TAKEN)
@pytest.mark.parametrize(
    ("arguments", "name", "taken"),
    [
        (["sweep", "tiny-bert", "-o"], "x.jsonl", "x.jsonl"),
        (["sweep", "tiny-bert", "-o"], "x.jsonl", "x.md"),
        (["measure", "tiny-bert", "-o"], "x.jsonl", "x.csv"),
        (["measure", "tiny-bert", "--export-json"], "x.json", "x.json"),
        (["train", "digits", "--steps", "1", "-o"], "x.jsonl", "x.jsonl"),
        (["train", "digits", "--steps", "1", "-o"], "x.jsonl", "x.csv"),
        (["train", "digits", "--steps", "1", "--export-curves"], "x.svg", "x.svg"),
    ],
)
def test_an_output_that_cannot_be_made_is_refused_before_the_first_case(
    cli: Any, tmp_path: Path, take: Callable[[Path], None], arguments: list[str], name: str, taken: str
) -> None:
    place = tmp_path / "out"
    place.mkdir()
    take(place / taken)
    before = sorted(tmp_path.rglob("*"))

    cli.refused(*arguments, place / name, naming="out")

    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("take", [dead_link, circle, below_no_folder])
def test_a_model_folder_that_cannot_be_made_is_refused_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[[Path], None]
) -> None:
    (tmp_path / "out").mkdir()
    take(tmp_path / "out" / "model")
    monkeypatch.setattr("actbench.workload.load_workload", lambda *_: pytest.fail("a model was read"))

    with pytest.raises(StoreError, match="out/model"):
        convert_workload(Case(model="tiny-bert", scheme="fewbit:3", batch_size=1), tmp_path / "out" / "model")


def test_a_model_folder_of_a_long_name_is_refused_before_the_model_is_built(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="File name too long"):
        convert_workload(Case(model="tiny-bert", scheme="fewbit:3", batch_size=1), tmp_path / TOO_LONG)


def test_results_that_cannot_be_written_are_refused_before_the_first_case(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_record: Callable[..., MeasuredRecord]
) -> None:
    file, opened = tmp_path / "x.jsonl", os.open
    file.write_text(make_record().model_dump_json() + "\n")

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if Path(os.fsdecode(path)) == file and flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)

    cli.refused("sweep", "tiny-bert", "-o", file, naming="Permission denied")


def test_a_file_name_as_long_as_names_may_be_is_exported_to(
    cli: Any, tmp_path: Path, make_record: Callable[..., MeasuredRecord]
) -> None:
    (tmp_path / "x.jsonl").write_text(make_record().model_dump_json() + "\n")
    target = tmp_path / ("a" * 255)

    assert cli("report", "x.jsonl", "--export-csv", target).status == 0
    assert "tiny" in target.read_text()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(65 * 2**20)


@pytest.mark.parametrize(("make", "naming"), [(pipe, "regular file"), (endless, "regular file"), (large, "more than")])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["sweep", "x.toml"], "x.toml"),
        (["train", "x.toml"], "x.toml"),
        (["measure", "tiny-bert", "--device-profile", "x.toml"], "x.toml"),
        (["fit", "tiny-bert", "--device-profile", "x.toml"], "x.toml"),
        (["measure", "tiny-bert", "-s", "fewbit:3,functions=x.py:f"], "x.py"),
    ],
)
def test_a_file_that_never_ends_or_is_larger_than_any_of_its_kind_is_not_read(
    cli: Any, tmp_path: Path, make: Callable[[Path], None], naming: str, arguments: list[str], name: str
) -> None:
    make(tmp_path / name)

    assert name in cli.refused(*arguments, naming=naming)
