"""What progress on cases tells in lines: when, and of what."""

from __future__ import annotations

import pytest
from drawnprogress import MEASURED, cases, console, text_of

from actbench.model.data import OutcomeData
from actbench.model.records import Failure
from actbench.model.scripts import Script
from actbench.run import display, progresslines
from actbench.run.display import LiveTable, shown
from actbench.run.progress import names_among
from actbench.run.progresslines import ProgressLines
from actbench.units import GIB

FAILED = Failure(reason="crash", message="it died\nof something")


@pytest.fixture
def lines(monkeypatch):
    """Return lines of progress, whose clock is ``at``, and a function that returns and forgets what they told."""

    class Clocked(ProgressLines):
        at = 0.0

        def told(self):
            text = self._console.file.getvalue()
            self._console.file.seek(0)
            self._console.file.truncate()
            return text.splitlines()

    monkeypatch.setattr(progresslines.time, "monotonic", lambda: Clocked.at)
    return Clocked(console(terminal=False))


def test_verbose_lines_tell_of_each_case_that_starts_or_ends():
    where = console(terminal=True)
    first, second = cases(2)
    with shown(where, verbose=True) as lines:
        lines.planned([first, second], 1)
        lines.started(first)
        lines.memory_read(first, 3 * GIB)
        lines.finished(first, MEASURED)
        lines.message("a [note]")
        lines.doing("solving for plans")
        lines.finished(second, FAILED)
    assert where.file.getvalue().splitlines() == [
        "starts: model0, fewbit:3",
        "[1/2] model0, fewbit:3: peak 3.00 GiB",
        "a [note]",
        "solving for plans …",
        "[2/2] model1, fewbit:3: failed, crash",
    ]


def test_each_case_that_ends_has_a_line(lines):
    many = cases(40)
    lines.planned(many)
    for case in many:
        lines.started(case)
        lines.finished(case, MEASURED)
    assert [line.partition(",")[0] for line in lines.told()] == [f"[{n + 1}/40] model{n}" for n in range(40)]


def test_of_cases_of_a_search_that_end_within_a_second_the_last_has_a_line(lines):
    many = cases(400)
    lines.planned(many, more=True)
    for place, case in enumerate(many):
        lines.started(case)
        type(lines).at = place / 16
        lines.finished(case, MEASURED)
        lines.tick()
    told = lines.told()
    assert len(told) == 25
    assert told[0].startswith("[1 done] model0, ")
    type(lines).at += 1
    lines.tick()
    assert [line.partition("]")[0] for line in lines.told()] == ["[400 done"]
    lines.tick()
    assert lines.told() == []


def test_messages_are_no_progress_and_are_all_written(lines):
    (case,) = cases(1)
    for text in ("one", "two"):
        lines.message(text)
        lines.noted(case, text)
    assert lines.told() == ["one", f"{case.title}: one", "two", f"{case.title}: two"]


def test_nothing_is_silent_for_more_than_ten_seconds(lines):
    first, second, third = cases(3)
    lines.planned([first, second, third])
    said = []
    for now in range(36):
        type(lines).at = float(now)
        if now == 12:
            lines.doing("solving for plans")
        if now == 25:
            for case in (first, second, third):
                lines.started(case)
        lines.tick()
        said += [(now, line) for line in lines.told()]
    assert said == [
        (10, "getting ready … (after 10 s)"),
        (20, "solving for plans … (after 20 s)"),
        (30, f"{'; '.join(f'model{n}, fewbit:3: first step (5 s)' for n in range(2))}; 1 more (after 30 s)"),
    ]
    lines.finished(first, MEASURED)
    type(lines).at = 50.0
    lines.tick()
    assert lines.told()[1].endswith("first step (25 s); 1 of 3 done (after 50 s)")


def test_a_search_says_what_it_is_after_and_has_no_line_for_what_it_leaves_out(lines):
    class LeftOut(OutcomeData):
        is_told = property(lambda self: False)

    first, second = cases(2)
    lines.planned([first, second], more=True)
    lines.doing("solving for plans")
    lines.started(first)
    lines.finished(first, LeftOut())
    lines.started(second)
    assert lines.told() == []
    type(lines).at = 11.0
    lines.tick()
    assert lines.told() == ["solving for plans; model1, fewbit:3: first step (11 s); 1 done (after 11 s)"]


def test_cases_that_end_together_are_told_of_and_waited_for(lines):
    first, second = (case.model_copy(update={"meter": "cpu", "model": "m"}) for case in cases(2))
    second = second.model_copy(update={"scheme": "exact"})
    lines.planned([first, second])
    lines.grouped([first, second])
    assert lines.told() == ["2 cases are timed in turns and end together: m, fewbit:3, exact, batch 8 (cpu)"]
    for case in (first, second):
        lines.started(case)
        lines.memory_read(case, GIB)
    lines.round_timed(first, 4)
    type(lines).at = 11.0
    lines.tick()
    (told,) = lines.told()
    assert told == (
        "m, fewbit:3: 4 steps timed (11 s); m, exact: waits for its turn (11 s); 2 cases end together (after 11 s)"
    )


@pytest.mark.parametrize("as_bar", [True, False])
def test_long_work_tells_what_it_took_and_what_is_left(monkeypatch, as_bar):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    where, many = console(terminal=as_bar), cases(3)
    with shown(where, as_bar=as_bar, verbose=not as_bar) as lines:
        lines.planned(many)
        now = 6.0  # modules are imported
        for case, seconds in zip(many, (3, 21, 170), strict=True):
            lines.started(case, steps=1)
            now += seconds
            lines.finished(case, MEASURED)
    ends = [line.partition("3.00 GiB")[2].rstrip() for line in where.file.getvalue().splitlines() if "3.00 GiB" in line]
    assert ends == ["", " (after 30 s, about 12 s left)", " (after 3m 20s)"]


def test_cases_that_are_planned_later_leave_what_is_known_of_others():
    first, second = cases(2)
    table = LiveTable(console(terminal=True))
    table.planned([first])
    table.started(first)
    table.finished(first, MEASURED)
    table.planned([first, second])
    assert "measured" in text_of(table)
    assert "waiting" in text_of(table)


@pytest.mark.parametrize("terminal", [True, False])
def test_counting_begins_anew_where_other_cases_are_planned(terminal):
    where = console(terminal=terminal)
    first, second, third = cases(3)
    with shown(where, verbose=not terminal) as told:
        told.planned([first])
        told.started(first)
        told.finished(first, MEASURED)
        told.planned([first, second])
        told.started(second)
        told.finished(second, MEASURED)
        told.planned([third])
        told.started(third)
        told.finished(third, MEASURED)
        said = text_of(told) if terminal else where.file.getvalue()
    assert ("1 of 1 cases" if terminal else "[1/1] model2") in said
    assert terminal or "[2/2] model1" in said


@pytest.mark.parametrize("terminal", [True, False])
def test_a_search_promises_no_number_of_cases_and_no_end(terminal, monkeypatch):
    monkeypatch.setattr(progresslines, "WORTH_TELLING_SECONDS", 0.0)
    where = console(terminal=terminal)
    first, second = cases(2)
    with shown(where) as told:
        told.planned([first, second], more=True)
        told.started(first)
        told.finished(first, MEASURED)
        said = text_of(told) if terminal else where.file.getvalue()
    assert ("1 done" if terminal else "[1 done] model0") in said
    assert "of 2" not in said
    assert "/2]" not in said
    assert "left" not in said
    assert terminal or "(after " in said


def test_time_left_is_of_the_cases_that_are_planned_and_not_of_the_search_before():
    table = LiveTable(console(terminal=True))
    first, second = cases(2)
    table.planned([first], more=True)
    table.started(first)
    table.finished(first, MEASURED)
    table.planned([second])
    table.started(second)
    assert "0 of 1 cases" in text_of(table)
    assert "left: -:--:--" in text_of(table)


def test_a_line_names_what_distinguishes_a_case_from_the_others():
    case = cases(1)[0]
    exact = case.model_copy(update={"scheme": "exact"})
    script = exact.model_copy(
        update={"model": "/home/me/train.py --big", "script": Script(target="/home/me/train.py", arguments=("--big",))}
    )
    changes = ({"optimizer": "sgd"}, {"batch_size": 16}, {"meter": "cpu"}, {"sequence_length": 512}, {"model": "other"})
    others = [case.model_copy(update=change) for change in changes]

    assert names_among([exact])[exact] == "model0"
    assert names_among([script])[script] == "train.py --big"
    long = script.model_copy(
        update={
            "model": f"/home/me/train.py {'x' * 60} --y",
            "script": Script(target="/home/me/train.py", arguments=("x" * 60, "--y")),
        }
    )
    assert names_among([long])[long] == "train.py …"
    assert names_among([case])[case] == "model0, fewbit:3"
    assert [names_among([case, other])[other] for other in others] == [
        "model0, fewbit:3, sgd",
        "model0, fewbit:3, batch 16",
        "model0, fewbit:3 (cpu)",
        "model0, fewbit:3, sequence length 512",
        "other, fewbit:3",
    ]


def test_a_case_over_its_limit_is_no_failure_and_tells_by_how_much():
    where = console(terminal=False)
    [case] = cases(1)
    over = MEASURED.model_copy(update={"memory_limit_bytes": 2 * GIB, "over_limit_bytes": GIB})
    table = LiveTable(console(terminal=True))
    table.planned([case], 1)
    table.finished(case, over)
    assert "over the limit" in text_of(table)
    with shown(where) as lines:
        lines.planned([case], 1)
        lines.finished(case, over)
    assert where.file.getvalue().strip().endswith("peak 3.00 GiB, over the limit by 1.00 GiB")


def test_a_failure_is_said():
    where = console(terminal=True)
    [first] = cases(1)
    with shown(where) as table:
        table.planned([first], 1)
        table.started(first)
        table.finished(first, FAILED)
        assert "crash" in text_of(table)
    assert "it died" not in where.file.getvalue()  # it stands below the table of results


def test_each_trial_has_a_verbose_line_and_nothing_is_promised_of_searches_before_one_has_ended(monkeypatch):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    where = console(terminal=False)
    first, second = (
        case.model_copy(update={"meter": "cpu", "find_largest_batch": True, "device_profile": None})
        for case in cases(2)
    )
    with shown(where, verbose=True) as lines:
        lines.planned([first, second])
        for case in (first, second):
            lines.started(case)
        now = 20.0
        for case in (first, second):
            lines.measured(case, MEASURED)
        for case in (first, second):
            lines.searching(case)
            now += 5.0
            lines.tried(case, 9, True)
            now += 5.0
            lines.tried(case, 10, False)
            lines.finished(case, MEASURED.model_copy(update={"largest_batch": 9}))
    assert where.file.getvalue().splitlines()[2:] == [
        "measured: model0, fewbit:3: peak 3.00 GiB; the search for its largest batch follows",
        "measured: model1, fewbit:3: peak 3.00 GiB; the search for its largest batch follows",
        "searches: model0, fewbit:3",
        "model0, fewbit:3: batch 9 fits (after 25 s)",
        "model0, fewbit:3: batch 10 does not fit (after 30 s)",
        "[1/2] model0, fewbit:3: peak 3.00 GiB, largest batch 9 (after 30 s, about 10 s left)",
        "searches: model1, fewbit:3",
        "model1, fewbit:3: batch 9 fits (after 35 s, about 5 s left)",
        "model1, fewbit:3: batch 10 does not fit (after 40 s)",
        "[2/2] model1, fewbit:3: peak 3.00 GiB, largest batch 9 (after 40 s)",
    ]


def test_simulated_cases_promise_nothing_of_those_on_a_device(monkeypatch):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    where = console(terminal=False)
    first, second = cases(2)
    with shown(where, verbose=True) as lines:
        lines.planned([first, second.model_copy(update={"meter": "cpu"})])
        lines.started(first)
        now = 20.0
        lines.finished(first, MEASURED)
    assert where.file.getvalue().splitlines()[1].endswith("3.00 GiB (after 20 s)")
