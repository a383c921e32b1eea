"""A fit that goes on from the simulations of an earlier one, and one whose time ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from fitcommand import AMONG, DEEP, HERE, STEP, TRAINED_ALL, records_below

from actbench.model.records import Case
from actbench.tools.fit.answer import fitted, is_usual, without_limit
from actbench.tools.fit.budget import Budget
from actbench.tools.fit.records import Training


@pytest.mark.exhaustive
def test_copies_of_a_deep_model_are_in_no_table_and_simulated_once(cli, log, tmp_path) -> None:
    words = ("fit", DEEP, *STEP[2:], *AMONG, "--memory-limit", "6GiB", "-o", tmp_path, "--export-json", "-")
    first = cli(*words)
    simulated = log.read_text()
    again = cli(*words)

    copies = {record.case.model for record in records_below(tmp_path) if record.of_copy}
    assert copies == {"tiny-llama@num_hidden_layers=4", "tiny-llama@num_hidden_layers=6"}
    assert {record["case"]["model"] for record in json.loads(first.out)} == {DEEP}
    assert all("num_hidden_layers=4" not in table.read_text() for table in tmp_path.rglob("*.fit.*[dv]"))
    assert (again.status, log.read_text()) == (0, simulated)
    one, two = ({json.dumps(record) for record in json.loads(ended.out)} for ended in (first, again))
    assert one == two
    assert "0 simulations of the whole model\n" in again.err


@pytest.mark.exhaustive
def test_a_model_that_was_a_copy_of_another_has_its_own_rows(cli, log, tmp_path) -> None:
    words = (*STEP[2:], *AMONG, "--memory-limit", "6GiB", "-o", tmp_path / "one.jsonl")
    cli("fit", DEEP, *words)
    copy = cli("fit", "tiny-llama@num_hidden_layers=4", *words)

    assert copy.status == 0, copy.err
    assert "What fits: tiny-llama@num_hidden_layers=4" in copy.out


@pytest.mark.exhaustive
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


@pytest.mark.slow
def test_an_answer_from_some_of_the_simulations_says_so_first(cli, log, tmp_path, clock) -> None:
    clock.left = 3

    ended = cli(*STEP, "-j", "1", "--memory-limit", "20GiB", "-o", tmp_path)

    assert ended.status == 0
    assert unwrapped(ended.out).startswith("The search stopped after 120 s (--budget), before it had tried all usual ")
    assert "run the same command again to continue. Faster plans may exist." in unwrapped(ended.out)


@pytest.mark.parametrize("began", [1, 3], ids=["only the exact step", "a part of the stacks"])
@pytest.mark.sampled(slow=1)
def test_time_that_ends_is_no_reason_for_a_smaller_model(cli, log, tmp_path, clock, began) -> None:
    clock.left = began
    words = (*STEP, *TRAINED_ALL, "--scheme", "lora:16", "-j", "1", "--memory-limit", "512MiB", "-o", tmp_path)

    ended = cli(*words)

    said = "Nothing found yet within twice the exact step's time. The search stopped after 120 s (--budget), before it"
    assert ended.status == 1
    for told in (unwrapped(ended.out), unwrapped(ended.err)):
        assert f"{said} had tried all usual stacks" in told
        assert "nothing fits" not in told.lower()
        assert "smaller" not in told
        assert "--device-profile" not in told


def test_on_a_slow_machine_the_first_answer_is_of_the_usual_stacks(cli, log, tmp_path, clock) -> None:
    clock.seconds_each = 14.0

    ended = cli(*STEP, "-j", "1", "--memory-limit", "2GiB", "-o", tmp_path)

    schemes = [line.split()[1] for line in log.read_text().splitlines()]
    assert ended.status == 0, ended.err
    assert schemes[0] == "exact"
    assert [is_usual(scheme, "exact") for scheme in schemes[1:5]] == [True] * 4
    assert not is_usual(schemes[5], "exact")  # single changes have some of the time
    first, second, *_ = unwrapped(ended.out).split("Faster plans may exist. ")
    assert first.startswith("The search stopped after 120 s (--budget), before it had tried all single changes")
    assert second.startswith("Plan 1 needs ")
    assert "trains adapters" in second.partition("What fits")[0]
    table = ended.out.partition("What fits: ")[2].partition("Frontier")[0]
    assert all(name in table for name in ("exact", "lora:16, checkpoint", "chunked_loss:8"))


def test_ctrl_c_takes_the_best_plan_so_far(cli, log, tmp_path, monkeypatch) -> None:
    begins = Budget.may_begin

    def interrupted(budget: Budget) -> bool:
        if len(log.read_text().splitlines() if log.exists() else "") >= 6 and not budget.is_stopped:
            signal.raise_signal(signal.SIGINT)
        return begins(budget)

    monkeypatch.setattr(Budget, "may_begin", interrupted)

    ended = cli(*STEP, "-j", "1", "--memory-limit", "2GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    assert len(log.read_text().splitlines()) == 6
    first, second, *_ = unwrapped(ended.out).split("Faster plans may exist. ")
    assert first.startswith("The search stopped by Ctrl-C, before it had tried all ")
    assert second.startswith("Plan 1 needs ")


@pytest.mark.slow
def test_the_same_command_tries_the_rest(cli, log, tmp_path, clock) -> None:
    clock.seconds_each = 14.0
    words = (*STEP, *AMONG, "--scheme", "lora:16", "--memory-limit", "2GiB", "-j", "1", "-o", tmp_path)
    first = cli(*words)
    before = log.read_text()
    clock.seconds_each = 0.0

    second = cli(*words)

    assert "The search stopped" in first.out
    assert "The search stopped" not in second.out
    assert log.read_text().startswith(before)
    assert len(set(log.read_text().splitlines())) == len(log.read_text().splitlines())


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("question", "count", "told"),
    [
        (("--longest-sequence",), 12, "no time was left to try more"),
        (("--longest-sequence", "--memory-limit", "4GiB"), 3, "Nothing found yet."),
        (("--which-card",), 20, "Not all plans could be tried in time for "),
    ],
    ids=["a size", "no size", "some cards"],
)
def test_other_questions_say_first_that_the_time_ended_and_what_was_found(
    cli, log, tmp_path, clock, question, count, told
) -> None:
    clock.left = count

    ended = cli(*STEP, *AMONG, *question, "-j", "1", "-o", tmp_path)

    assert ended.status == (told == "Nothing found yet."), ended.err
    said = "The search stopped after 600 s (--budget), before it had tried all "
    assert unwrapped(ended.out).removeprefix("Nothing found yet. ").startswith(said)
    assert told in unwrapped(ended.out) + unwrapped(ended.err)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
from actbench.tools.fit import scripts, simulations
scripts._OF_MODELS, simulations._needed = "fakefit", lambda *_: ((), ())
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
    assert re.search(rf"^continued from \S+, which had {len(before)} simulations of this fit$", ended.stderr, re.M)
    lines = next(output.rglob("*.fit.jsonl")).read_text().splitlines()
    assert len({json.dumps(json.loads(line)["case"]) for line in lines}) == len(lines)
