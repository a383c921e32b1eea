"""What a fit says of itself: what crashed, what fits unchanged, how much it simulated, and where it is stored."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fitcommand import AMONG, DEEP, STEP
from madeup import found, record_of

import actbench
from actbench.model.records import Failure
from actbench.tools.fit.answer import answer, numbered
from actbench.tools.fit.codegen import pieces_of
from actbench.tools.fit.command import RESULTS
from actbench.tools.fit.records import Training
from actbench.tools.fit.tables import fit_tables

ROOT = Path(__file__).parents[3]
CRASHED = "crashed, a fault of actbench and not of your model, so plans may be missing: gact"
WHY = "The first: RuntimeError: gact met an operator"


@pytest.fixture
def _crashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulations of gact crash."""
    monkeypatch.setenv("FAKEFIT_CRASHED", "gact")


@pytest.mark.slow
@pytest.mark.usefixtures("_crashing", "log")
def test_an_answer_ends_with_what_crashed(cli, tmp_path) -> None:
    page, text = tmp_path / "page.html", tmp_path / "text.md"
    words = (*STEP, *AMONG, "--memory-limit", "6GiB", "-o", tmp_path / "out")
    ended = cli(*words, "--export-markdown", text, "--html", page)

    (file,) = (tmp_path / "out").rglob("*.fit.jsonl")
    count = file.read_text().count('"reason":"crash"')
    said = f"{count} simulation{'s' if count > 1 else ''} {CRASHED}"
    told = unescaped(text).partition("| Plan")[0]
    assert ended.status == 0, ended.err
    assert count > 0
    assert unwrapped(said) in unwrapped(ended.out.partition("What fits")[0])
    assert unwrapped(ended.out.partition("What fits")[0]).endswith(unwrapped(f"{WHY}; see {file}"))
    assert "of which pages follow" not in ended.out
    assert said in told
    assert f"{WHY}; see {file}" in told
    assert f"{WHY}; see {file}" in page.read_text()
    assert "not for this model: gact" not in ended.err
    assert f"{WHY}\n" in unescaped(file.with_suffix(".md"))


def unwrapped(text: str) -> str:
    """Return a text without spaces: lines end anywhere in a long path."""
    return "".join(text.split())


def unescaped(markdown: Path) -> str:
    return markdown.read_text().replace("\\", "")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_crashing", "log")
def test_what_crashed_is_simulated_again_and_then_nothing_is_said_of_it(cli, tmp_path, monkeypatch) -> None:
    words = (*STEP, *AMONG, "--memory-limit", "6GiB", "-o", tmp_path)
    first = cli(*words)
    monkeypatch.delenv("FAKEFIT_CRASHED")
    second = cli(*words)

    assert "crashed" in first.out
    assert "crashed" not in second.out
    assert "gact" in second.out
    assert "continued from" in second.err


@pytest.mark.slow
@pytest.mark.usefixtures("_crashing", "log")
def test_other_questions_say_what_crashed(cli, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--largest-batch", "-o", tmp_path)

    assert CRASHED in " ".join(ended.out.split())


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_crashing", "log")
def test_the_result_in_python_has_what_crashed() -> None:
    crashed = actbench.fit(
        "tiny-llama", device_profile="rtx-4090", batch_size=4, memory_limit="6GiB", schemes=["gact:L2", "checkpoint"]
    ).crashed

    assert crashed
    assert all("gact:L2" in each and "RuntimeError: gact met an operator" in each for each in crashed)


def test_tables_of_records_say_what_crashed() -> None:
    failure = Failure(reason="crash", message="killed")
    crashed = record_of("gact:L2", 100, 90).model_copy(update={"outcome": failure})

    tables = fit_tables([record_of("exact", 100, 90), crashed])

    assert tables[0].lead[-1] == f"1 simulation {CRASHED}. The first: killed"


def test_what_fits_unchanged_is_said_first_and_has_nothing_to_paste() -> None:
    fitting = found(("checkpoint", 1.2, 50), exact=90)

    assert answer(fitting) == ("It fits unchanged: 90.00 GiB of 100.00 GiB.",)  # no plan is faster
    assert fitting.shortlist() == [fitting.exact]
    assert not pieces_of([("Plan 1", fitting.exact)], 1)
    named = [("Plan 1", plan) for plan in fitting.tried]
    assert len(pieces_of(named, 1)) == len(pieces_of(named, 5)) > 0


def test_faster_plans_follow_what_fits_unchanged() -> None:
    first, second = answer(found(("msln", 0.9, 50), exact=90))

    assert first == "It fits unchanged: 90.00 GiB of 100.00 GiB."
    assert second.startswith("Plan 1 needs 50.00 GiB of 100.00 GiB and 10 % less time (estimated), and ")


def test_the_code_is_that_of_the_answers_first_plan() -> None:
    fitting = found(("gact:L2", 0.9, 50, Training(gradient="unbiased")), ("checkpoint", 1.2, 60), exact=200)
    first, second = numbered(fitting)  # that with exact gradients first, though it is slower

    assert [line.rpartition(": ")[2] for line in answer(fitting)] == [f"{first.words}.", f"{second.words}."]
    assert (first.record.case.scheme, second.record.case.scheme) == ("checkpoint", "gact:L2")
    assert pieces_of([("1", first), ("2", second)], 1) == pieces_of([("1", first)], 5)
    assert [heading.partition(":")[0] for heading, _ in pieces_of([("1", first), ("2", second)], 2)[::3]] == ["1", "2"]


def test_nothing_is_said_to_fit_unchanged_where_it_does_not() -> None:
    assert "unchanged" not in " ".join(answer(found(("checkpoint", 1.2, 50), exact=200)))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("log")
def test_what_every_plan_has_fits_alone(cli, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--base", "lora:16", "--memory-limit", "12GiB", "-o", tmp_path)

    assert ended.out.startswith("It fits with lora:16 alone: ")


@pytest.mark.exhaustive
def test_counts_say_what_they_count_and_a_first_fit_continues_nothing(cli, log, tmp_path) -> None:
    ended = cli("fit", DEEP, *STEP[2:], *AMONG, "--memory-limit", "6GiB", "-o", tmp_path)

    simulated = log.read_text().splitlines()
    whole = sum(line.endswith(DEEP) for line in simulated)
    assert 0 < whole < len(simulated)
    assert f"{whole} simulations of the whole model, {len(simulated) - whole} of smaller copies of it\n" in ended.err
    assert "continue" not in ended.err
    assert "taken" not in ended.err


def test_results_are_stored_in_a_folder_that_a_clone_does_not_track() -> None:
    assert f"/{RESULTS}/" in (ROOT / ".gitignore").read_text().splitlines()
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", str(RESULTS)], cwd=ROOT, capture_output=True, text=True, check=True)
        assert not listed.stdout


@pytest.mark.exhaustive
@pytest.mark.usefixtures("log")
def test_results_are_stored_below_where_it_runs(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    ended = cli(*STEP, *AMONG, "--memory-limit", "6GiB")

    (file,) = (each.relative_to(tmp_path) for each in tmp_path.rglob("*.jsonl"))
    assert file.parts[0] == str(RESULTS)
    assert f"results: {file}" in ended.err
