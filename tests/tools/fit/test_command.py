"""``actbench fit`` as it is typed, on steps that are made up (``fakefit``)."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actbench.model.records import Case
from actbench.report import store
from actbench.run import local, runner
from actbench.simulator import profiles
from actbench.tools.fit import simulations
from actbench.tools.fit.records import FitRecord, Training
from actbench.tools.fit.shortlist import fitted, without_limit

HERE = str(Path(__file__).parent)
AMONG = [word for name in ("checkpoint", "gact:L2", "chunked_loss:8") for word in ("--scheme", name)]
STEP = ("fit", "tiny-llama", "--device-profile", "rtx-4090", "-b", "4", "--sequence-length", "8")
CPU = "gib = 4\nfp32 = 0.1\nbandwidth = 20\nlink = 10\nlaunch = 1\n"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that makes steps up."""
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("fakefit")


@pytest.fixture
def log(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let steps be made up, and return the file that they are listed in."""
    monkeypatch.setattr("actbench.tools.fit.simulations._BENCH", "fakefit")
    monkeypatch.setattr("actbench.tools.fit.simulations.PRELOAD", ())
    monkeypatch.setitem(runner.run_plan.__kwdefaults__, "bench", "fakefit")
    monkeypatch.setitem(runner.run_plan.__kwdefaults__, "preload", ())
    monkeypatch.setattr(local, "available_memory_bytes", lambda: 1 << 40)  # room for all that is made up, in one round
    path = tmp_path / "log"
    monkeypatch.setenv("FAKEFIT_LOG", str(path))
    return path


def records_below(folder: Path) -> tuple[FitRecord, ...]:
    (file,) = folder.rglob("*.fit.jsonl")
    return store.read_results(file, FitRecord).records


@pytest.mark.parametrize(
    ("words", "naming"),
    [
        (("fit", "tiny-lama", "--device-profile", "rtx-4090"), "did you mean tiny-llama"),
        (("fit", "tiny-llama"), "--device-profile: name the card that the step is to fit on"),
        (("fit", "tiny-llama", "--device-profile", "rtx-4091"), "did you mean rtx-4090"),
        (("fit", "tiny-llama", "--device-profile", "cuda-16gib"), "no time can be estimated; name another card"),
        ((*STEP, "--batch-size", "0"), "--batch-size"),
        ((*STEP, "--memory-limit", "24"), "'24' is not an amount of memory"),
        ((*STEP, "--memory-limit", "0GiB"), "more than zero"),
        ((*STEP, "--max-slowdown", "0.9"), "--max-slowdown"),
        ((*STEP, "--scheme", "checkpont"), "did you mean 'checkpoint'"),
        ((*STEP, "--scheme", "checkpoint+gact:L2"), "name them one by one"),
        ((*STEP, "--scheme", "checkpoint,only=model.layers.0"), "fit chooses the blocks itself; leave only= out"),
        ((*STEP, "--base", "compile,only=model.layers.*"), "fit compares estimated times, and a step with it has none"),
        ((*STEP, "--scheme", "compile"), "fit compares estimated times, and a step with it has none"),
        ((*STEP, "--scheme", "fsdp:8"), "fit plans for one process, and fsdp:8 spreads a model over 8"),
        ((*STEP, "--scheme", "tp:2"), "fit plans for one process, and tp:2 spreads a model over 2"),
        ((*STEP, "--base", "lra:16"), "--base: scheme 'lra:16': there is no scheme"),
        ((*STEP, "--base", "checkpoint+selective"), "--base: "),
        ((*STEP, "--base", "zero1:4"), "--base zero1:4: fit plans for one process"),
        ((*STEP, "--optimizer", "adamx"), "--optimizer"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_simulated(cli, log, tmp_path, words, naming) -> None:
    cli.refused(*words, "--output", tmp_path / "none", naming=naming)

    assert not log.exists()
    assert not (tmp_path / "none").exists()


def test_a_table_is_no_place_for_records(cli, log, tmp_path) -> None:
    cli.refused(*STEP, *AMONG, "--output", tmp_path / "fit.md", naming="name a folder or a .jsonl file")

    assert not log.exists()


def test_the_answer_comes_first_and_its_plan_in_json_csv_and_markdown(cli, log, fake, tmp_path) -> None:
    ended = cli(
        *STEP, *AMONG, "--memory-limit", "6GiB", "-o", tmp_path, "--export-json", "-", "--export-csv", tmp_path / "t"
    )

    assert ended.status == 0, ended.err
    found = [FitRecord.model_validate(each) for each in json.loads(ended.out)]
    fitting = [each for each in found if each.outcome.peak_bytes <= 6 * fake.GIB]
    fastest = min(fitting, key=lambda each: each.outcome.estimated.step_seconds).case.scheme
    assert fastest == "gact:L2,only=model.layers.0"  # the other block stays as it is
    assert "gact:L2 on block 0, adamw-fused: 6.00 GiB of 6.00 GiB, 1.17 of the exact step's time" in ended.err
    rows = (tmp_path / "t").read_text().splitlines()
    assert rows[0].startswith("scheme,optimizer,plan,")
    assert rows[1].startswith('"gact:L2,only=model.layers.0",adamw-fused,"gact:L2 0, adamw-fused",')
    assert set(found) == set(records_below(tmp_path))
    (table,) = tmp_path.rglob("*.fit.md")
    assert "gact:L2 on block 0" in table.read_text()


def test_every_line_of_a_pipe_has_what_answers_the_question(cli, log, tmp_path) -> None:
    words = ("fit", DEEP, *STEP[2:], *AMONG)
    ended = cli(*words, "--memory-limit", "6GiB", "-o", tmp_path)

    first, *_ = ended.out.splitlines()
    assert " on blocks " in first
    heads = [line for line in ended.out.splitlines() if line.startswith(" Plan")]
    assert heads
    for head in heads:
        assert all(title in head for title in ("Need", "(est.)", "Gradient")), head
    answer = ended.out.partition("What fits")[0]
    assert len(answer.splitlines()) <= 4
    assert "GiB of 6.00 GiB" in answer


DEEP = "tiny-llama@num_hidden_layers=16"


@pytest.mark.slow
def test_copies_of_a_deep_model_are_in_no_table_and_simulated_once(cli, log, tmp_path) -> None:
    words = ("fit", DEEP, *STEP[2:], *AMONG, "--memory-limit", "6GiB", "-o", tmp_path, "--export-json", "-")
    first = cli(*words)
    simulated = log.read_text()
    again = cli(*words)

    copies = {record.case.model for record in records_below(tmp_path) if record.of_copy}
    assert copies == {"tiny-llama@num_hidden_layers=3", "tiny-llama@num_hidden_layers=5"}
    assert {record["case"]["model"] for record in json.loads(first.out)} == {DEEP}
    assert all("num_hidden_layers=3" not in table.read_text() for table in tmp_path.rglob("*.fit.*[dv]"))
    assert (again.status, log.read_text()) == (0, simulated)
    one, two = ({json.dumps(record) for record in json.loads(ended.out)} for ended in (first, again))
    assert one == two
    assert "0 cases simulated whole" in again.err


@pytest.mark.slow
def test_a_model_that_was_a_copy_of_another_has_its_own_rows(cli, log, tmp_path) -> None:
    words = (*STEP[2:], *AMONG, "--memory-limit", "6GiB", "-o", tmp_path / "one.jsonl")
    cli("fit", DEEP, *words)
    copy = cli("fit", "tiny-llama@num_hidden_layers=3", *words)

    assert copy.status == 0, copy.err
    assert "What fits: tiny-llama@num_hidden_layers=3" in copy.out


@pytest.mark.slow
def test_every_plan_has_the_base(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--base", "lora:16", "--memory-limit", "2GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    assert all("lora:16" in record.case.scheme for record in records_below(tmp_path))
    assert "Every plan has lora:16, and so has the exact step." in ended.out
    assert "adapters" not in ended.out


@pytest.mark.slow
def test_a_later_fit_takes_no_plans_from_an_earlier_one(cli, log, fake, tmp_path) -> None:
    words = (*STEP, *AMONG, "--scheme", "lora:16", "-o", tmp_path)

    def plans(limit: int, base: str) -> dict[Case, Training]:
        (found,) = [
            each
            for each in fitted(records_below(tmp_path))
            if (each.limit_bytes, each.case.scheme) == (limit * fake.GIB, base)
        ]
        return {without_limit(each.record.case): each.training for each in found.tried}

    assert cli(*words, "--memory-limit", "6GiB").status == 0
    first = plans(6, "exact")
    assert cli(*words, "--memory-limit", "4GiB").status == 0
    second = plans(4, "exact")
    assert cli(*words, "--memory-limit", "4GiB", "--base", "lora:16").status == 0

    assert len(first) > 3
    assert plans(6, "exact") == first
    assert plans(4, "exact") == second
    assert {each.trained for each in plans(4, "lora:16").values()} == {"all"}


def test_quiet_leaves_out_progress(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--quiet", "--memory-limit", "6GiB", "-o", tmp_path)

    assert ended.status == 0
    assert "starts:" not in ended.err
    assert "results: " in ended.err


def test_a_scheme_that_refuses_the_model_is_said_once_and_the_rest_is_planned(cli, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKEFIT_REFUSED", "offload")
    words = (*AMONG, "--scheme", "offload")
    ended = cli(*STEP, *words, "--memory-limit", "6GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    told = [line for line in ended.err.splitlines() if line.startswith("not for this model: ")]
    assert told == ["not for this model: offload: unsupported: this model has nothing to move"]
    assert "offload" not in ended.out


@pytest.mark.slow
def test_schemes_with_nothing_to_do_are_one_line_and_verbose_says_why(cli, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKEFIT_IDLE", "offload,lora:4")
    words = (*STEP, *AMONG, "-s", "offload", "-s", "lora:4", "--memory-limit", "6GiB", "-o", tmp_path)
    ended, verbose = cli(*words), cli(*words, "--verbose")

    assert "failed" not in ended.err
    assert "nothing-converted" not in ended.err
    assert "nothing to do in this model (--verbose says why): offload, lora:4\n" in ended.err
    assert "not for this model: lora:4: nothing-converted: it holds no layer for this" in verbose.err
    assert "nothing to do" not in verbose.err


@pytest.mark.slow
def test_progress_calls_nothing_over_the_limit_but_what_the_user_limits(cli, log, tmp_path) -> None:
    whole = cli(*STEP, *AMONG, "--memory-limit", "12GiB", "--verbose", "-o", tmp_path / "whole")
    half = cli(*STEP, *AMONG, "--memory-limit", "6GiB", "--verbose", "-o", tmp_path / "half")

    assert "Frontier" in whole.out, "whose plans are simulated with less than the limit"
    assert "over the limit" not in whole.err
    assert "over the limit" in half.err


def test_above_the_exact_peak_the_answer_is_the_exact_step(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--memory-limit", "12GiB", "--exact", "-o", tmp_path)

    assert ended.status == 0, ended.err
    assert ended.out.startswith("adamw-fused: 9.50 GiB of 12.00 GiB, 0.97 of the exact step's time")


def test_a_model_without_blocks_is_changed_as_a_whole(cli, log, tmp_path) -> None:
    model = tmp_path / "own.py"
    model.write_text("def build(): pass\n")

    ended = cli("fit", f"{model}:build", *STEP[2:4], *AMONG, "--memory-limit", "6GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    assert "only=" not in ended.out + log.read_text()
    assert "What fits" in ended.out


def test_only_what_trains_exactly_is_tried_if_that_is_asked(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--memory-limit", "6GiB", "--exact", "-o", tmp_path)

    assert {each.training.gradient for each in records_below(tmp_path)} == {"exact"}
    assert ended.status == 0, ended.err


def test_what_is_slower_than_asked_is_no_answer(cli, log, tmp_path) -> None:
    among = ("--scheme", "checkpoint", "--max-slowdown", "1.2", "-o", tmp_path)

    ended = cli(*STEP, *among, "--memory-limit", "6GiB")

    assert ended.status == 1
    told = " ".join(ended.err.split())
    assert "nothing fits within --max-slowdown 1.2: checkpoint, adamw-fused fits and takes 1.26 times" in told


@pytest.mark.slow
def test_the_last_request_decides_what_is_too_slow(cli, log, tmp_path) -> None:
    words = (*STEP, "--scheme", "checkpoint", "--memory-limit", "6GiB", "-o", tmp_path)
    assert cli(*words).status == 0

    slow = cli(*words, "--max-slowdown", "1.2")
    fast = cli(*words)

    assert slow.status == 1
    assert "0 cases simulated whole" in slow.err
    assert "Nothing takes at most 1.2 times" in slow.out
    assert "What fits" not in slow.out
    assert fast.status == 0
    assert "What fits" in fast.out


TRAINED_ALL = ("--scheme", "checkpoint", "--scheme", "adam8bit")


@pytest.mark.slow
def test_adapters_that_fit_are_an_answer_where_nothing_else_does(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *TRAINED_ALL, "--scheme", "lora:16", "--memory-limit", "3GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    assert "What fits: " not in ended.out
    first, second = ended.out.index("What fits, with adapters: "), ended.out.index("No simulated plan fits; what needs")
    assert first < second
    assert "lora:16" in ended.out[:first]
    assert "adapters trained in place of the model" in ended.out[:first]
    assert "checkpoint on block 0, lora:16, adamw-fused: a loop of your own" in ended.out


def end_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time be over once so many simulations have begun."""
    begun = []

    def ends(run: simulations.Simulations) -> bool:
        begun.append(1)
        run.over = len(begun) > count
        return not run.over

    monkeypatch.setattr(simulations.Simulations, "_in_time", ends)


def test_an_answer_from_some_of_the_simulations_says_so_first(cli, log, tmp_path, monkeypatch) -> None:
    end_after(3, monkeypatch)

    ended = cli(*STEP, "-j", "1", "--memory-limit", "20GiB", "-o", tmp_path)

    assert ended.status == 0
    assert ended.out.startswith("The time of --budget ended before all plans were simulated")


@pytest.mark.parametrize("began", [1, 3], ids=["only the exact step", "a part of the survey"])
@pytest.mark.slow
def test_time_that_ends_is_no_reason_for_a_smaller_model(cli, log, tmp_path, monkeypatch, began) -> None:
    end_after(began, monkeypatch)
    words = (*STEP, *TRAINED_ALL, "--scheme", "lora:16", "-j", "1", "--memory-limit", "512MiB", "-o", tmp_path)

    ended = cli(*words)

    told = " ".join(ended.err.split())
    assert ended.status == 1
    assert "the time of --budget ended before the plan that needs least was simulated: give a larger --budget" in told
    assert "nothing fits" not in (told + ended.out).lower()
    assert "smaller" not in told
    assert "--device-profile" not in told


@pytest.mark.parametrize(
    ("function", "wants", "tried", "remarks"),
    [
        ("half", (), {"exact adamw-fused"}, ("the model's parameters are bfloat16: no other precision was tried",)),
        ("descent", (), {"autocast:bfloat16 None"}, ("no other implementation of the model's own optimizer",)),
        *(
            pytest.param(*each, (), marks=pytest.mark.slow)
            for each in (
                ("build", (), {"autocast:bfloat16 None", "exact adamw-fused"}),
                ("descent", ("--optimizer", "adamw"), {"autocast:bfloat16 adamw", "exact adamw-fused"}),
                ("half", ("--dtype", "float32"), {"autocast:bfloat16 None", "exact adamw-fused"}),
            )
        ),
    ],
)
def test_types_and_optimizers_are_tried_for_a_model_of_ones_own(
    cli, log, tmp_path, function, wants, tried, remarks
) -> None:
    model = tmp_path / "own.py"
    model.write_text("def build(): pass\nhalf = descent = build\n")
    words = ("fit", f"{model}:{function}", *STEP[2:4], *wants, "--scheme", "autocast:bfloat16")

    ended = cli(*words, "-o", tmp_path)

    assert ended.status == 0, ended.err
    stacks = {" ".join(line.split()[1:3]) for line in log.read_text().splitlines()}
    assert tried <= stacks
    assert any("autocast" in stack for stack in stacks) == (function != "half" or bool(wants))
    assert any("fused" in stack for stack in stacks) == (function != "descent" or bool(wants))
    for remark in ("no other precision", "no other implementation"):
        assert (remark in ended.err) == any(remark in each for each in remarks)
    for remark in remarks:
        assert remark in " ".join(ended.err.split())


def test_impossible_says_what_is_least_and_what_would_have_to_give(cli, log, fake, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--exact", "--memory-limit", "2GiB", "-o", tmp_path)

    told = " ".join(ended.err.split())
    least = fake.WEIGHTS + fake.HELD * 0.25 + fake.TOP * 0.5
    assert ended.status == 1
    plan = "chunked_loss:8, checkpoint, adamw-fused"
    said = f"nothing fits in 2.00 GiB: the least that is possible, {plan}, needs {least / fake.GIB:.2f} GiB"
    assert said in told
    assert ended.out.startswith("nothing fits in 2.00 GiB: the least that is possible")
    assert "take a smaller --batch-size or shorter samples, or a larger --memory-limit" in told
    assert "leave out --exact" in told
    assert "What fits" not in ended.out


def test_the_smallest_card_that_would_do_is_named(cli, log, tmp_path, monkeypatch) -> None:
    words = [word if word != "rtx-4090" else "rtx-4060" for word in STEP]

    larger = profiles.get("rtx-3080-10gb")
    unrated = dataclasses.replace(larger, name="unrated", rates=None, memory_bytes=larger.memory_bytes - 1)
    monkeypatch.setattr(profiles, "profiles", lambda known=profiles.profiles: [unrated, *known()])  # fit refuses it

    ended = cli(*words, "--scheme", "chunked_loss:8", "--exact", "-o", tmp_path)

    assert ended.status == 1
    assert "--device-profile rtx-3080-10gb, the smallest card that would do" in " ".join(ended.err.split())


def test_where_the_model_alone_is_too_much_no_smaller_batch_is_advised(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--memory-limit", "512MiB", "-o", tmp_path)

    assert ended.status == 1
    assert "weights, gradients and optimizer state alone are 1.00 GiB" in " ".join(ended.err.split())
    assert "--batch-size" not in ended.err


def test_a_device_that_is_not_there_is_told_before_anything_is_simulated(cli, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    told = cli.refused(
        *STEP, *AMONG, "--measure", "-o", tmp_path / "none", naming="--measure: rtx-4090 is a CUDA device"
    )

    assert "leave --measure out, or give the same command on a machine that has one" in told
    assert not log.exists()


def test_what_is_measured_stands_beside_what_was_simulated(cli, log, fake, tmp_path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(CPU)
    words = [str(profile) if word == "rtx-4090" else word for word in STEP]

    ended = cli(*words, *AMONG, "--memory-limit", "6GiB", "--measure", "-o", tmp_path)

    assert ended.status == 0, ended.err
    meters = [line.split()[0] for line in log.read_text().splitlines()]
    assert meters.count("cpu") == 2
    assert "Measured and estimated" in ended.out
    (table,) = tmp_path.rglob("*.fit.md")
    section = table.read_text().partition("Measured and estimated")[2].partition("Frontier")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    heads, lines = rows[0], [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert {"Peak off by", "Step off by"} <= set(heads)
    simulated, measured = lines[0], lines[1]
    assert simulated["Meter"] == "simulated"
    assert "est." in simulated["Step"]
    assert measured["Meter"] == "cpu"
    assert "est." not in measured["Step"]
    assert measured["Peak off by"] == f"{100 * (fake.OVER_ESTIMATE - 1):+.1f} %"
    (record,) = [each for each in records_below(tmp_path) if each.case.meter == "cpu"][:1]
    assert record.outcome.estimated is None
    assert record.outcome.step_seconds
    assert record.outcome.step_seconds[0] == fake.SECONDS / fake.OVER_ESTIMATE

    again = cli(*words, *AMONG, "--memory-limit", "6GiB", "--measure", "-o", tmp_path)

    assert again.status == 0
    assert len(log.read_text().splitlines()) == len(meters)  # all of it stood in the file


@pytest.mark.slow
def test_a_row_of_a_device_is_none_of_the_shortlist(cli, log, tmp_path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(CPU)
    words = [str(profile) if word == "rtx-4090" else word for word in STEP]
    cli(*words, *AMONG, "--memory-limit", "6GiB", "--measure", "-o", tmp_path)
    csv = next(tmp_path.rglob("*.fit.csv")).read_text().splitlines()

    stacks = [tuple(row.split(",")[:2]) for row in csv[1:]]

    assert len(stacks) == len(set(stacks))


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
from actbench.tools.fit import simulations
simulations._BENCH, simulations.PRELOAD = "fakefit", ()
sys.argv = ["actbench", *{words!r}]
from actbench.cli import main
main()
"""


@pytest.mark.slow
def test_a_fit_that_is_killed_goes_on_where_it_was(tmp_path) -> None:
    log, output = tmp_path / "log", tmp_path / "output"
    words = [*STEP, *AMONG, "--memory-limit", "3GiB", "-j", "1", "--budget", "600", "-o", str(output)]
    command = [sys.executable, "-c", PROGRAM.format(here=HERE, words=words)]
    environment = {**os.environ, "FAKEFIT_LOG": str(log), "FAKEFIT_SLEEP": "0.3"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        deadline = time.monotonic() + 120
        while not (log.exists() and len(log.read_text().splitlines()) >= 3):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    before = [record.case for record in records_below(output)]

    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    cases = [record.case for record in records_below(output)]
    assert ended.returncode == 0, ended.stderr
    assert cases[: len(before)] == before
    assert len(set(cases)) == len(cases)
    assert f"{len(before)} taken from the results file" in ended.stderr
    lines = next(output.rglob("*.fit.jsonl")).read_text().splitlines()
    assert len({json.dumps(json.loads(line)["case"]) for line in lines}) == len(lines)


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


@pytest.mark.slow
def test_a_fit_of_a_script_goes_on_until_the_script_changes(cli, log, train) -> None:
    words = (*SCRIPT, "-s", "checkpoint", "--memory-limit", "6GiB", "-o", "out")
    cli(*words)
    first = log.read_text()
    assert cli(*words).status == 0
    assert log.read_text() == first

    train.write_text("print('trains otherwise')\n")

    assert cli(*words).status == 0
    assert log.read_text() == 2 * first
