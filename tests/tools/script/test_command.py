"""``actbench run``: a script of the user's own, with what a step needs made up."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from actbench.tools.script import command

TRAIN = """
import sys
print("epoch 1", sys.argv[1:])
print("a warning", file=sys.stderr)
"""
MODULE = "import sys\nprint('module', sys.argv[1:])\n"


@pytest.fixture(autouse=True)
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script in the current folder, which also holds the module ``package.inner``."""
    monkeypatch.setattr(command, "BENCH", "fakescript")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(MODULE)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


def test_what_stands_behind_the_script_is_its_own(cli: Any) -> None:
    ended = cli(
        "run", "--device-profile", "rtx-4090", "train.py", "--help", "-o", "x", "--scheme", "fewbit:3", "--", ""
    )

    assert ended.status == 0
    assert "epoch 1 ['--help', '-o', 'x', '--scheme', 'fewbit:3', '--', '']\n" in ended.out
    assert "a warning\n" in ended.err
    assert "a warning" not in ended.out
    assert "train.py --help -o x --scheme fewbit:3 -- '' fits into the 24.00 GiB of rtx-4090" in ended.out
    assert not Path("x").exists()


def test_what_stands_behind_a_module_is_its_own(cli: Any) -> None:
    ended = cli("run", "--quiet", "-m", "package.inner", "--steps", "3", "-m", "more")

    assert ended.status == 0
    assert "module [" not in ended.out
    assert "-m package.inner --steps 3 -m more fits into" in ended.out
    assert "module ['-b', '2', '--help']\n" in cli("run", "-b", "4", "-m", "package.inner", "-b", "2", "--help").out


def test_the_output_says_what_holds_the_peak_and_what_is_worth_trying(cli: Any) -> None:
    out = cli("run", "train.py").out

    told = " ".join(out.split())
    assert (
        "with 11.50 GiB to spare: the peak of a step, with batches of 16 rows, is 12.00 GiB in the backward pass."
        in told
    )
    assert "needs 12.50 GiB: its peak of 12.00 GiB, and 512.00 MiB that torch's allocator loses in gaps." in told
    assert "backward pass 12.00 GiB 300 ms" in told
    assert "saved tensors 8.00 GiB 66.7 %" in told
    assert "train.py:3 logits = model(x) saved tensors 7.00 GiB 58.3 %" in told
    assert "block.mlp saved tensors, weights 11.00 GiB 91.7 %" in told
    assert "checkpoint: 67 % of the peak are saved tensors" in told
    assert 'model = actbench.convert(model, "checkpoint")' in told
    assert "Worth trying; to see what each saves and costs: actbench run --scheme NAME train.py" in out


def test_the_last_line_is_the_command_that_plans_for_the_same_step(cli: Any) -> None:
    given = ("--device-profile", "rtx-4090", "--memory-limit", "20GiB", "-b", "4")
    last = cli("run", *given, "train.py", "--lr", "1 2").out.splitlines()[-1]

    words = shlex.split(last.partition(": ")[2])
    flags = {"--script": "train.py --lr '1 2'", "--device-profile": "rtx-4090", "--batch-size": "4"}
    assert last.startswith("Or plan schemes block by block: ")
    assert words[:2] == ["actbench", "fit"]
    assert dict(zip(words[2::2], words[3::2], strict=True)) == {**flags, "--memory-limit": f"{20 * 1024**3}B"}
    assert "block by block" not in cli("run", "--gpus", "2", "train.py").out, "fit plans for one card"


@pytest.mark.slow
def test_a_card_that_nobody_named_is_said_to_be_assumed_before_all_else(cli: Any) -> None:
    first = (
        "No --device-profile is named, so the card is assumed to be cuda-16gib: name yours with --device-profile NAME "
        "('actbench devices' lists them).\ntrain.py fits into"
    )

    assert first in cli("run", "--quiet", "train.py").out[:400]
    assert first in cli("run", "--quiet", "--export-json", "-", "train.py").err
    assert "assumed" not in cli("run", "--device-profile", "cuda-16gib", "train.py").out
    assert "assumed" not in cli("run", "--meter", "cpu", "train.py").out


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("options", [(), ("-s", "checkpoint")])
def test_notes_say_once_what_is_made_up_and_where_the_script_was_stopped(cli: Any, options: tuple[str, ...]) -> None:
    made_up, stopped = "script prints are made up", "The script was stopped after 3 steps; the rest of it did not run."
    told = cli("run", *options, "train.py").out

    assert (told.count(made_up), told.count(stopped)) == (1, 1)
    quiet = cli("run", "--quiet", *options, "train.py").out
    assert (quiet.count(made_up), quiet.count(stopped)) == (0, 0)


@pytest.mark.slow
def test_a_note_says_what_the_weights_are_and_what_autocast_computes_in(cli: Any, train: Path) -> None:
    plain = cli("run", "train.py").out
    train.write_text(f'{TRAIN}AUTOCAST = "bfloat16"')
    command = ("run", "-s", "exact", "-s", "checkpoint", "train.py")
    cast = cli(*command).out

    assert "type float32, optimizer AdamW" in " ".join(plain.split())
    assert "type float32, autocast bfloat16, optimizer AdamW" in " ".join(cast.split())


@pytest.mark.slow
def test_schemes_are_rows_beside_the_unchanged_script_which_alone_prints(cli: Any) -> None:
    ended = cli("run", "-s", "checkpoint", "-s", "exact", "train.py")

    rows = [line.split() for line in ended.out.splitlines() if " simulated  " in line]
    assert [row[:3] for row in rows] == [["train.py", "16", "exact"], ["train.py", "16", "checkpoint"]]
    assert "33.3 %" in ended.out
    assert ended.out.count("epoch 1") == 1
    assert "Worth trying" not in ended.out
    assert "train.py, checkpoint (simulated): step 2: peak 12.4 GiB" in ended.err
    assert "epoch 1" not in cli("run", "--quiet", "train.py").out


def test_an_export_to_standard_output_has_it_alone(cli: Any) -> None:
    ended = cli("run", "--batch-size", "4", "--gpus", "8", "--export-json", "-", "train.py", "--lr", "3")

    (record,) = json.loads(ended.out)
    assert "epoch 1" in ended.err
    assert record["case"]["model"] == "train.py --lr 3"
    assert record["case"]["batch_size"] == 4
    assert record["case"]["script"] == {
        "target": "train.py",
        "is_module": False,
        "arguments": ["--lr", "3"],
        "batch_size": 4,
        "steps": None,
        "processes": 8,
        "raise_oom": False,
    }
    assert list(record["files"]) == ["train.py"]


@pytest.mark.slow
def test_a_stored_row_is_run_again_once_the_script_has_changed(cli: Any, train: Path) -> None:
    command = ("run", "-o", "out.jsonl", "train.py")
    first, second = cli(*command), cli(*command)
    train.write_text(f"{TRAIN}PEAK_GIB = 20\n")
    third, other = cli(*command), cli(*command, "--lr", "3")
    (train.parent / "blk.py").write_text("WIDTH = 2")
    beside = cli(*command)
    train.write_text(f"{TRAIN}import blk")
    imported = cli(*command)
    (train.parent / "blk.py").write_text("WIDTH = 3")
    fourth, fifth = cli(*command), cli(*command)

    assert "epoch 1" in first.out
    assert "epoch 1" not in second.out
    assert "12.00 GiB" in second.out
    assert "0 measured, 0 failed, 1 taken from the results file" in second.err
    assert "20.00 GiB" in third.out
    assert "epoch 1 ['--lr', '3']" in other.out
    assert ["epoch 1" in each.out for each in (beside, imported, fourth, fifth)] == [False, True, True, False]
    assert "epoch 1" in cli("run", "--force", *command[1:]).out


def test_a_stored_failure_is_run_again_when_asked(cli: Any, train: Path) -> None:
    train.write_text("from pathlib import Path\nPath('data').read_text()\n")
    command = ("run", "-o", "out.jsonl", "train.py")
    failed = cli(*command)
    Path("data").write_text("1")

    assert "No such file" in failed.out
    assert cli(*command).status == 1
    assert cli("run", "--retry-failed", *command[1:]).status == 0


@pytest.mark.slow
def test_a_script_that_does_not_fit_is_measured_and_may_be_refused(cli: Any, train: Path) -> None:
    train.write_text("PEAK_GIB = 30\n")
    ended = cli("run", "train.py")

    assert ended.status == 0
    assert "train.py does not fit into the 24.00 GiB of cuda-16gib: 6.00 GiB are missing." in ended.out
    assert cli("run", "--require-fit", "train.py").status == 1
    assert "the limit of 16.00 GiB: 14.00 GiB are missing" in cli("run", "--memory-limit", "16GiB", "train.py").out


def test_the_largest_batch_of_a_script_is_proved_by_its_own_batches(cli: Any) -> None:
    limit = ("--verbose", "--max-batch", "--memory-limit", "20GiB", "train.py")
    simulated, real = cli("run", *limit), cli("run", "--meter", "cpu", *limit)

    assert "The largest batch that fits is 32." in simulated.out
    assert "The largest batch that fits is 32." in real.out
    assert "batch 32 fits" in real.err
    assert "batch 33 does not fit" in real.err
    assert real.out.count("epoch 1") == 1


def test_a_peak_that_only_a_real_run_would_know_is_marked(cli: Any, train: Path) -> None:
    reason = "nonzero has at most 16 rows (train.py:7 kept = scores.nonzero())"
    train.write_text(f"AT_MOST = ({reason!r},)\n")
    out = cli("run", "-s", "checkpoint", "--columns", "peak", "--export-csv", "rows.csv", "train.py").out

    assert "at most 12.00 GiB" in out
    assert "at most 8.00 GiB" in out
    assert reason in " ".join(out.split())
    assert "at_most_peak_bytes" in Path("rows.csv").read_text()


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
    assert "what each saves and costs: actbench run --scheme NAME train.py --lr 3\n" in compared.out


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize(
    ("text", "naming"),
    [
        ("REFUSED = 'train.py:7 is not simulated'\n", "unsupported: MeasurementError: train.py:7 is not simulated"),
        ("raise ValueError('no data')\n", "crash: ValueError: no data"),
        ("import sys; sys.exit('bye')\n", "crash: SystemExit: bye"),
        ("import os; print('last', flush=True); os._exit(3)\n", "ended by itself with exit code 3"),
    ],
)
def test_a_script_that_fails_is_told_once(cli: Any, train: Path, text: str, naming: str) -> None:
    train.write_text(text)
    ended = cli("run", "train.py")

    assert ended.status == 1
    assert ended.out.count(naming) == 1
    assert "Traceback" not in ended.out + ended.err
    assert "Worth trying" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "naming"),
    [
        (["nothing.py"], "nothing.py: there is no such file"),
        (["--", "python", "train.py"], "python: leave this word out, since actbench starts Python itself"),
        (["/usr/bin/python3.12", "train.py"], "python3.12: leave this word out"),
        (["package"], "package is a folder: name the script in it"),
        (["notes.txt"], "notes.txt is no Python script"),
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


def test_the_memory_over_the_step_is_shown_and_written(cli: Any) -> None:
    ended = cli("run", "--timeline", "--export-timeline", "t.json", "--html", "t.html", "train.py")

    assert "peak 12.00 GiB in the" in ended.out
    assert json.loads(Path("t.json").read_text())[0]["timeline"]["peak_bytes"] == 12 * 1024**3
    assert "The largest holders at the peak, by the line that made them" in Path("t.html").read_text()
