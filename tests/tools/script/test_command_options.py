"""Options of ``actbench run`` stand before the script, those behind it are its own, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakescript import TRAIN

pytestmark = pytest.mark.usefixtures("train")


def test_what_stands_behind_the_script_is_its_own(cli: Any) -> None:
    ended = cli(
        "run", "--device-profile", "rtx-4090", "train.py", "--help", "-o", "x", "--scheme", "fewbit:3", "--", ""
    )

    assert ended.status == 0
    assert "epoch 1 ['--help', '-o', 'x', '--scheme', 'fewbit:3', '--', '']\n" in ended.out
    assert "a warning\n" in ended.err
    assert "a warning" not in ended.out
    assert "train.py --help -o x --scheme fewbit:3 -- '' fits on rtx-4090: " in ended.out
    assert not Path("x").exists()


def test_what_stands_behind_a_module_is_its_own(cli: Any) -> None:
    ended = cli("run", "--quiet", "-m", "package.inner", "--steps", "3", "-m", "more")

    assert ended.status == 0
    assert "module [" not in ended.out
    assert "-m package.inner --steps 3 -m more fits on" in ended.out
    assert "module ['-b', '2', '--help']\n" in cli("run", "-b", "4", "-m", "package.inner", "-b", "2", "--help").out


@pytest.mark.sampled(fast=2, slow=3)
@pytest.mark.parametrize(
    ("source", "arguments", "behind"),
    [
        (
            "",
            ("4", "--device-profile", "rtx-4090", "--lr", "4", "--scheme=checkpoint"),
            (
                "--device-profile and --scheme after train.py go to the script; options of actbench stand before it: "
                "actbench run --device-profile rtx-4090 --scheme=checkpoint train.py 4 --lr 4"
            ),
        ),
        (
            "",
            ("--lr", "4", "--batch-size", "4"),
            (
                "--batch-size after train.py goes to the script; options of actbench stand before it: "
                "actbench run --batch-size 4 train.py --lr 4"
            ),
        ),
        ("", ("--force", "4"), "stand before it: actbench run --force train.py 4"),
        (
            "",
            ("4", "--scheme"),
            (
                "--scheme after train.py goes to the script; options of actbench stand before it: "
                "actbench run train.py 4\n"
            ),
        ),
        ("", ("--scheme", "--force", "4"), "stand before it: actbench run --force train.py 4\n"),
        ("# --batch-size\n", ("--batch-size", "4"), None),
        ("def train(batch_size=4): ...\n", ("--batch-size", "4"), None),
        ("", ("--lr", "3", "-s", "x"), None),
    ],
)
def test_options_of_actbench_behind_a_script_that_does_not_know_them_are_told(
    cli: Any, train: Path, source: str, arguments: tuple[str, ...], behind: str | None
) -> None:
    train.write_text(f"{TRAIN}{source}")
    ended = cli("run", "train.py", *arguments)

    assert ended.status == 0
    assert ("stand before it" in ended.err) == (behind is not None)
    assert (behind or "") in ended.err
    assert f"epoch 1 {list(arguments)}" in ended.out


def test_options_stand_before_the_dashes_that_end_them(cli: Any, train: Path) -> None:
    told = cli("run", "--gpus", "1", "--", "train.py", "--force", "--lr", "3")
    compared = cli("run", "--", "train.py", "--lr", "3")

    assert "stand before it: actbench run --gpus 1 --force train.py --lr 3\n" in told.err
    assert "to see what it saves: actbench run --scheme checkpoint train.py --lr 3\n" in compared.out


@pytest.mark.parametrize(
    ("arguments", "naming"),
    [
        (["nothing.py"], "nothing.py: there is no such file"),
        (["--", "python", "train.py"], "python: leave this word out, since actbench starts Python itself"),
        (["/usr/bin/python3.12", "train.py"], "python3.12: leave this word out"),
        (["package"], "package is a folder: name the script in it"),
        (["notes.txt"], "notes.txt is not a Python script"),
        (["broken.py"], "broken.py:2: SyntaxError: expected ':'\n    for x in y\n              ^"),
        (["zero.py"], "zero.py"),
        (["-m", "package.nothing"], "-m package.nothing: there is no module of this name"),
        (["-m", "package"], "-m package: 'python -m package' runs nothing, since there is no package.__main__"),
        (["--gpus", "2", "--meter", "cpu", "train.py"], "--gpus 2 cards are simulated, and --meter cpu measures"),
        (["--meter", "cpu", "--device-profile", "rtx-4090", "train.py"], "--device-profile rtx-4090 is simulated"),
        (["--device-profile", "rtx-5555", "train.py"], "there is no such device profile"),
        (["--memory-limit", "16", "train.py"], "--memory-limit: '16' is not an amount of memory"),
        (["-s", "nothing", "train.py"], "--scheme: "),
        (["-s", "fsdp:2", "train.py"], "--scheme fsdp:2 changes placement over processes"),
        (["-s", "adam8bit", "-s", "adam8bit:torchao", "train.py"], "are the same scheme"),
        (["--lr", "3", "train.py"], "No such option"),
        (["--batch-size", "0", "train.py"], "0 is not at least 1"),
        (["--export-timeline", "x.txt", "train.py"], "--export-timeline x.txt: name a file that ends in"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(cli: Any, arguments: list[str], naming: str) -> None:
    Path("notes.txt").write_text("print(1)")
    Path("broken.py").write_text("y = []\nfor x in y\n    pass\n")
    Path("zero.py").write_bytes(b"x = 1\0\n")

    assert "starts:" not in cli.refused("run", *arguments, naming=naming)


def test_a_script_that_cannot_be_read_is_named(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(path: Path, most_bytes: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("actbench.tools.script.declared.read_bytes", unreadable)  # root may read everything

    cli.refused("run", "train.py", naming="train.py cannot be read: Permission denied")


def test_the_help_begins_with_run_and_answers_for_it(cli: Any) -> None:
    lines = cli("--help").out.splitlines()
    first = next(place for place, line in enumerate(lines) if "Commands" in line) + 1

    assert lines[first].split()[1] == "run"
    assert "actbench run --device-profile rtx-4090 train.py --lr 3e-4" in cli("run", "--help").out
