"""What ``actbench run`` prints and exports of a script of the user's own, with what a step needs made up."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakescript import TRAIN

from actbench.report.render.screen import NOTE_LINES

pytestmark = pytest.mark.usefixtures("train")


def test_the_verbose_output_says_what_holds_the_peak_and_what_is_worth_trying(cli: Any) -> None:
    out = cli("run", "--verbose", "train.py").out

    told = " ".join(out.split())
    assert "needs 12.50 GiB: its peak of 12.00 GiB, and 512.00 MiB that torch's allocator loses in gaps." in told
    assert "backward pass 12.00 GiB 300 ms" in told
    assert "saved tensors 8.00 GiB 66.7 %" in told
    assert "train.py:3 logits = model(x) saved tensors 7.00 GiB 58.3 %" in told
    assert "block.mlp saved tensors, 1 more 11.00 GiB 91.7 %" in told
    assert "checkpoint: 67 % of the peak are saved tensors" in told
    assert 'model = actbench.convert(model, "checkpoint")' in told
    assert "Worth trying; to see what each saves and costs: actbench run --verbose --scheme NAME train.py" in out


REMEDY = "ADVISED = {'scheme': 'checkpoint', 'needed_bytes': 5 * 2**30, 'step_seconds': 0.9, 'largest_batch': 40}\n"


def test_the_output_ends_with_three_lines_below_a_bar_and_five_lines_of_notes(cli: Any, train: Path) -> None:
    train.write_text(REMEDY)
    lines = cli("run", "--device-profile", "rtx-4090", "train.py").out.splitlines()
    *above, verdict, remedy, largest = lines

    assert verdict == (
        "train.py fits on rtx-4090: a step of 16 rows needs 12.50 GiB of the 24.00 GiB beside the CUDA context "
        "(512.00 MiB); 11.50 GiB are to spare."
    )
    assert remedy == (
        "With checkpoint it needs 5.00 GiB (60 % less) and takes 1.50 times as long (est.): "
        'import actbench; model = actbench.convert(model, "checkpoint")'
    )
    assert largest == "The largest batch that fits is 40 (it has 16)."
    assert above[0] == "The peak of a step, 12.00 GiB in the backward pass; | is the limit of 24.00 GiB:"
    assert above[2] == (
        "s saved tensors 8.00 GiB   w weights 2.00 GiB   o optimizer state 2.00 GiB   "
        "_ gaps of the allocator 512.00 MiB"
    )
    assert len(above) <= 4 + NOTE_LINES
    assert not any("─" in line for line in above), "tables are for --verbose"
    (hidden,) = [line for line in above if "more note" in line]
    assert hidden not in cli("run", "--device-profile", "rtx-4090", "--verbose", "train.py").out


def test_a_remedy_that_is_not_enough_comes_with_the_command_that_plans(cli: Any, train: Path) -> None:
    train.write_text(f"PEAK_GIB = 40\n{REMEDY}ADVISED |= {{'over_limit_bytes': 2**30, 'largest_batch': 0}}\n")
    _, remedy, plans, largest = cli("run", "train.py").out.splitlines()[-4:]

    assert "With checkpoint it needs 5.00 GiB, 1.00 GiB more than there is, (88 % less)" in remedy
    assert plans == "To plan schemes block by block: actbench fit --script train.py --device-profile cuda-16gib"
    assert largest == "Not even a batch of one row fits."


def test_what_takes_long_is_a_command(cli: Any, train: Path) -> None:
    train.write_text("ADVISED = {'is_slow': True}\n")
    _, remedy, largest = cli("run", "train.py", "--lr", "3").out.splitlines()[-3:]

    assert remedy.startswith("checkpoint may help, 67 % of the peak are saved tensors: ")
    assert remedy.endswith(
        "to see what it saves (a simulation takes more than 20 s): actbench run --full-answer train.py --lr 3"
    )
    assert largest == (
        "To find the largest batch that fits, by more simulations: actbench run --max-batch train.py --lr 3"
    )


def test_a_full_answer_is_of_a_bench_with_time_and_of_a_script_by_itself(
    cli: Any, train: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.write_text(f"PEAK_GIB = 40\n{REMEDY}")
    monkeypatch.setattr("actbench.tools.script.command.FOLLOWED_UP", "no_such_bench")

    assert "With checkpoint it needs 5.00 GiB" in cli("run", "--full-answer", "train.py").out
    monkeypatch.setattr("actbench.tools.script.command.FOLLOWED_UP", "fakescript")
    for is_full, limit, options in ((False, 0, ""), (True, 500, " --timeout 3600"), (True, 5000, " --timeout 10000")):
        slow = {"is_slow": True, "is_search_slow": True, "limit_seconds": limit, "is_full": is_full}
        train.write_text(f"ADVISED = {slow}\n")
        *_, remedy, largest = cli("run", "--force", "train.py").out.splitlines()
        assert ("(no time was left to simulate it)" in remedy) == (limit == 0)
        assert remedy.endswith(f"actbench run --force --full-answer{options} train.py")
        assert largest.endswith(f"actbench run --force --full-answer{options} train.py")
    train.write_text("ADVISED = {'is_search_slow': True, 'fitting_batch': 64}\n")
    assert "a search did not end in its time, in which 64 rows fit" in cli("run", "--force", "train.py").out
    for other in (("-s", "checkpoint"), ("--columns", "peak"), ("--meter", "cpu")):
        cli.refused("run", "--full-answer", *other, "train.py", naming="leave out --scheme, --columns, --meter")


def test_the_command_that_plans_is_for_the_same_step(cli: Any) -> None:
    given = ("--device-profile", "rtx-4090", "--memory-limit", "4GiB", "-b", "4", "--verbose")
    begin = "To plan schemes block by block: "
    (plans,) = [
        line for line in cli("run", *given, "train.py", "--lr", "1 2").out.splitlines() if line.startswith(begin)
    ]

    words = shlex.split(plans.removeprefix(begin))
    flags = {"--script": "train.py --lr '1 2'", "--device-profile": "rtx-4090", "--batch-size": "4"}
    assert words[:2] == ["actbench", "fit"]
    assert dict(zip(words[2::2], words[3::2], strict=True)) == {**flags, "--memory-limit": f"{4 * 1024**3}B"}
    assert "block by block" not in cli("run", "--gpus", "2", "-v", "train.py").out, "fit plans for one card"


@pytest.mark.slow
def test_a_card_that_nobody_named_is_said_to_be_assumed_before_all_else(cli: Any) -> None:
    first = (
        "No --device-profile is named, so the card is assumed to be cuda-16gib: name yours with --device-profile NAME "
        "('actbench devices' lists them).\nThe peak of a step"
    )

    assert first in cli("run", "--quiet", "train.py").out[:400]
    assert first in cli("run", "--quiet", "--export-json", "-", "train.py").err
    assert "assumed" not in cli("run", "--device-profile", "cuda-16gib", "train.py").out
    assert "assumed" not in cli("run", "--meter", "cpu", "train.py").out


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("options", [(), ("-s", "checkpoint")])
def test_notes_say_once_what_is_made_up_and_where_the_script_was_stopped(cli: Any, options: tuple[str, ...]) -> None:
    made_up, stopped = (
        "script prints are made up",
        "The script was stopped after 3 steps: --whole also runs its largest batch, its evaluations and its saves.",
    )
    told = cli("run", *options, "train.py").out

    assert (told.count(made_up), told.count(stopped)) == (1, 1)
    quiet = cli("run", "--quiet", *options, "train.py").out
    assert (quiet.count(made_up), quiet.count(stopped)) == (0, 0)


@pytest.mark.slow
def test_a_note_says_what_the_weights_are_and_what_autocast_computes_in(cli: Any, train: Path) -> None:
    plain = cli("run", "--verbose", "train.py").out
    train.write_text(f'{TRAIN}AUTOCAST = "bfloat16"')
    command = ("run", "--verbose", "-s", "exact", "-s", "checkpoint", "train.py")
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
    assert "train.py, checkpoint: step 2: peak 12.4 GiB" in ended.err
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
        "whole": False,
    }
    assert list(record["files"]) == ["train.py"]


@pytest.mark.slow
def test_a_script_that_does_not_fit_is_measured_and_may_be_refused(cli: Any, train: Path) -> None:
    train.write_text("PEAK_GIB = 30\n")
    ended = cli("run", "train.py")

    assert ended.status == 0
    assert "train.py does not fit on cuda-16gib: a step of 16 rows needs 30.50 GiB" in ended.out
    assert cli("run", "--require-fit", "train.py").status == 1
    assert "of 16.00 GiB; 14.00 GiB are missing" in cli("run", "--memory-limit", "16GiB", "train.py").out


def test_a_script_that_is_expected_to_run_out_of_memory_fails_where_it_has_to_fit(cli: Any, train: Path) -> None:
    train.write_text("GROWS_BYTES = 16 * 2**20\n")
    ended = cli("run", "--require-fit", "train.py")

    assert ended.out.splitlines()[-3] == "train.py grows by 16.00 MiB a step."
    assert "\ntrain.py fits on" in ended.out
    assert ended.status == 1
    train.write_text("")
    assert cli("run", "--require-fit", "train.py").status == 0


def test_where_most_of_the_memory_is_free_no_scheme_is_advised(cli: Any) -> None:
    roomy = cli("run", "--memory-limit", "200GiB", "-v", "train.py", "--lr", "3").out

    assert "checkpoint" not in roomy
    assert "checkpoint" in cli("run", "--memory-limit", "20GiB", "train.py").out


def test_the_largest_batch_of_a_script_is_proved_by_its_own_batches(cli: Any) -> None:
    limit = ("--verbose", "--max-batch", "--memory-limit", "20GiB", "train.py")
    simulated, real = cli("run", *limit), cli("run", "--meter", "cpu", *limit)

    assert "The largest batch that fits is 32 (it has 16)." in simulated.out
    assert "The largest batch that fits is 32 (it has 16)." in real.out
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


def test_the_memory_over_the_step_is_shown_and_written(cli: Any) -> None:
    ended = cli("run", "--timeline", "--export-timeline", "t.json", "--html", "t.html", "train.py")

    assert "peak 12.00 GiB in the" in ended.out
    assert json.loads(Path("t.json").read_text())[0]["timeline"]["peak_bytes"] == 12 * 1024**3
    assert "The largest holders at the peak, by the line that made them" in Path("t.html").read_text()


def test_the_hook_of_pre_commit_fails_where_the_script_does_not_fit(cli: Any, train: Path) -> None:
    hooks = Path(__file__).parents[3] / ".pre-commit-hooks.yaml"
    entry = next(line.split()[2:] for line in hooks.read_text().splitlines() if "entry:" in line)
    command = (*entry, "--device-profile", "rtx-4090", "train.py")

    assert cli(*command).status == 0
    train.write_text("PEAK_GIB = 30\n")
    assert cli(*command).status == 1


def test_a_pipe_gets_nothing_of_the_live_view(cli: Any) -> None:
    plainly, live = cli("run", "train.py"), cli("run", "--live", "train.py")

    assert live.out.replace(" --live", "") == plainly.out, "commands that are shown have the flags that were typed"
    assert sorted(live.err.splitlines()) == sorted(plainly.err.splitlines()), "in the order in which threads tell"
    assert "now   peak" not in live.out + live.err


@pytest.mark.slow
def test_a_terminal_shows_the_memory_and_what_the_script_prints(tmp_path: Path) -> None:
    script = tmp_path / "live.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        "for epoch in range(9):\n"
        "    print('epoch', epoch)\n"
        "    net(torch.ones(64, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    control, terminal = pty.openpty()
    command = [sys.executable, "-m", "actbench", "run", "--live", "--device-profile", "rtx-4090", str(script)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    parts = []
    with subprocess.Popen(command, env=environment, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        with suppress(OSError):  # the end of a terminal
            while part := os.read(control, 65536):
                parts.append(part)
    os.close(control)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode())

    assert process.returncode == 0
    assert re.search(r"GiB now   peak|MiB now   peak", drawn)
    assert "fits so far" in drawn
    assert "live.py:2 net = torch.nn.Linear" in drawn
    assert "epoch 0" in drawn
    assert "fits on rtx-4090" in drawn
