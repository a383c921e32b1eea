"""A fit of a training script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actbench.errors import UsageError
from actbench.tools.fit.budget import BUDGET_SECONDS
from actbench.tools.fit.records import FitRecord
from actbench.tools.fit.simulations import Means

SCRIPT = ("fit", "--script", "train.py --lr 3e-4", "--device-profile", "rtx-4090")


@pytest.fixture
def train(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a training script in the current folder, the steps of which are made up."""
    monkeypatch.setattr("actbench.tools.fit.scripts.bench_of", lambda case: "fakefit")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("print('trains')\n")
    return script


@pytest.mark.parametrize(
    ("words", "naming"),
    [
        (("fit", "--device-profile", "rtx-4090"), "name the MODEL that is to fit"),
        (("fit", "tiny-llama", *SCRIPT[1:]), "MODEL: not with --script, whose own lines"),
        (
            ("fit", "--script", "tran.py", *SCRIPT[3:]),
            "tran.py: there is no such file; name the script as python takes",
        ),
        (("fit", "--script", "-m no.module", *SCRIPT[3:]), "there is no module of this name"),
        (("fit", "--script", "-m", *SCRIPT[3:]), "name the module behind -m"),
        (("fit", "--script", "train.py 'a", *SCRIPT[3:]), "no closing quotation"),
        ((*SCRIPT, "--dtype", "bf16", "--optimizer", "sgd"), "--dtype and --optimizer: not with --script"),
        ((*SCRIPT, "--longest-sequence", "--measure"), "--longest-sequence and --measure: not with --script"),
        ((*SCRIPT, "--max-gradient-error", "0.1"), "--max-gradient-error: not with --script"),
        ((*SCRIPT, "-s", "accumulate:2"), "--scheme accumulate:2 changes batch, which a script sets in its own lines"),
        ((*SCRIPT, "--base", "pure:bfloat16"), "--base pure:bfloat16 changes precision"),
        (SCRIPT[:3], "--device-profile: name the card"),
    ],
)
def test_what_does_not_go_with_a_script_is_refused_before_it_runs(cli, log, train, words, naming) -> None:
    cli.refused(*words, naming=naming)

    assert not log.exists()


@pytest.mark.slow
def test_a_script_has_plans_with_lines_to_paste_and_what_it_sets_itself_is_said(cli, log, train) -> None:
    ended = cli(*SCRIPT, "-b", "4", "--exact", "--memory-limit", "6GiB", "-o", "out", "--export-json", "-")

    assert ended.status == 0, ended.err
    found = [FitRecord.model_validate(each) for each in json.loads(ended.out)]
    assert {each.case.model for each in found} == {"train.py --lr 3e-4"}
    assert all(each.case.script and each.case.script.batch_size == 4 for each in found)
    told = " ".join(ended.err.split())
    assert "What fits: train.py --lr 3e-4, batch 4, on rtx-4090" in told
    assert "import actbench # where the model is made, before its optimizer is model = actbench.convert(model," in told
    again = "actbench run --device-profile rtx-4090 --memory-limit 6442450944B --batch-size 4 -s "
    assert again in told
    assert told.partition(again)[2].partition("train.py --lr 3e-4")[1]
    (said,) = [line for line in ended.err.splitlines() if ": the script's own lines set" in line]
    assert {"accumulate", "channels_last", "release"} <= set(
        said.removeprefix("no plan has ").partition(":")[0].split(", ")
    )
    assert not any(name in log.read_text() for name in ("accumulate", "channels_last", "release", "adamw-fused"))
    assert [path.parent.name for path in Path("out").rglob("*.fit.jsonl")] == ["train-rtx-4090"]


@pytest.mark.exhaustive
def test_a_fit_of_a_script_goes_on_until_the_script_changes(cli, log, train) -> None:
    words = (*SCRIPT, "-s", "checkpoint", "--memory-limit", "6GiB", "-o", "out")
    cli(*words)
    first = log.read_text()
    assert cli(*words).status == 0
    assert log.read_text() == first

    train.write_text("print('trains otherwise')\n")

    assert cli(*words).status == 0
    assert log.read_text() == 2 * first


@pytest.mark.parametrize(("words", "seconds"), [((), 600), (("--budget", "7"), 7)])
def test_a_script_has_more_time_than_a_model(
    cli, train, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], seconds: int
) -> None:
    given: list[float | None] = []

    def find(case: object, asked: object, means: Means, **_: object) -> None:
        given.append(means.budget_seconds)
        raise UsageError("enough is known")

    monkeypatch.setattr("actbench.tools.fit.fit.find", find)

    cli.refused(*SCRIPT, *words, naming="enough is known")
    cli.refused("fit", "tiny-llama", "--device-profile", "rtx-4090", "-b", "2", *words, naming="enough is known")

    assert given == [seconds, min(seconds, BUDGET_SECONDS)]
