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
from actbench.tools.fit import simulations
from actbench.tools.fit.records import Training
from actbench.tools.fit.shortlist import fitted, without_limit


@pytest.mark.exhaustive
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
    assert "0 simulations of the whole model\n" in again.err


@pytest.mark.exhaustive
def test_a_model_that_was_a_copy_of_another_has_its_own_rows(cli, log, tmp_path) -> None:
    words = (*STEP[2:], *AMONG, "--memory-limit", "6GiB", "-o", tmp_path / "one.jsonl")
    cli("fit", DEEP, *words)
    copy = cli("fit", "tiny-llama@num_hidden_layers=3", *words)

    assert copy.status == 0, copy.err
    assert "What fits: tiny-llama@num_hidden_layers=3" in copy.out


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


def end_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time be over once so many simulations have begun."""
    begun = []

    def ends(run: simulations.Simulations) -> bool:
        begun.append(1)
        run.over = len(begun) > count
        return not run.over

    monkeypatch.setattr(simulations.Simulations, "_in_time", ends)


@pytest.mark.slow
def test_an_answer_from_some_of_the_simulations_says_so_first(cli, log, tmp_path, monkeypatch) -> None:
    end_after(3, monkeypatch)

    ended = cli(*STEP, "-j", "1", "--memory-limit", "20GiB", "-o", tmp_path)

    assert ended.status == 0
    assert ended.out.startswith("The time of --budget ended before all plans were simulated")


@pytest.mark.parametrize("began", [1, 3], ids=["only the exact step", "a part of the survey"])
@pytest.mark.sampled(slow=1)
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


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
from actbench.tools.fit import fitting, scripts
scripts._OF_MODELS, fitting._needed = "fakefit", lambda *_: ()
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
