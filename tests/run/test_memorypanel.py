"""The view of ``--live``: what it draws of given reports, and that a pipe gets nothing of it."""

from __future__ import annotations

import io
import itertools

from drawnprogress import MEASURED, cases, console, text_of
from rich.console import Console

from actbench.model.live import LiveMemory
from actbench.run.display import LiveMemoryTable, shown
from actbench.run.memorypanel import SeenMemory, memory_panel, stretches
from actbench.run.progresslines import ProgressLines
from actbench.units import GIB

LINE = "train.py:43 return x + self.mlp(x)"


def report(live: int = 2 * GIB, **fields: object) -> LiveMemory:
    held = {"peak_bytes": 9 * GIB, "limit_bytes": 8 * GIB, "step": 2, "phase": "backward", "samples": (GIB, live)}
    return LiveMemory(live_bytes=live, **(held | {"holders": ((LINE, GIB), ("blocks.0", GIB // 2))} | fields))


def lines_of(*reports: LiveMemory, width: int = 100, **options: object) -> list[str]:
    seen = SeenMemory()
    for each in reports:
        seen.add(each)
    drawn = Console(file=io.StringIO(), width=width, color_system=None)
    drawn.print(memory_panel("train.py", seen, width, elapsed="6 s", **options))
    return drawn.file.getvalue().splitlines()


def test_a_panel_has_the_step_the_figures_the_verdict_and_the_largest_holders() -> None:
    lines = lines_of(report())

    assert "train.py · step 2, backward pass · 6 s" in lines[0]
    assert "2.00 GiB now   peak 9.00 GiB of 8.00 GiB   does not fit: at least 1.00 GiB are missing" in lines[1]
    (held,) = [line for line in lines if LINE in line]
    assert held.split()[-4:-1] == ["GiB", "50", "%"]
    assert "blocks.0" in lines[-2]
    assert {len(line) for line in lines} == {100}


def test_the_verdict_so_far_is_of_the_peak_and_the_limit() -> None:
    assert "fits so far" in lines_of(report(peak_bytes=8 * GIB))[1]
    assert "does not fit" in lines_of(report(peak_bytes=8 * GIB + 1))[1]
    unlimited = lines_of(report(limit_bytes=None))[1]
    assert "fit" not in unlimited
    assert "peak 9.00 GiB  " in unlimited
    assert "step 2, ended" in lines_of(report(phase=None))[0]
    assert "step" not in lines_of(report(step=None, phase="forward"))[0]


def test_the_chart_is_the_memory_over_time_below_the_peak() -> None:
    chart = lines_of(report(samples=(0, 2 * GIB, 9 * GIB, 4 * GIB)), ascii_only=True)[2:7]

    assert [line[2:6] for line in chart] == ["  ! ", "  # ", "  # ", "  ##", " ###"]
    assert lines_of(report(samples=(9 * GIB,)))[2][2] == "█"


def test_samples_are_of_equal_time_however_many_there_are() -> None:
    seen = SeenMemory()
    for amount in range(10_000):
        seen.add(report(samples=(amount,)))

    assert len(seen.samples) < 4096
    gaps = {later - one for one, later in itertools.pairwise(seen.samples)}
    assert len(gaps) == 1
    assert list(stretches([1, 5, 2, 3, 9, 4], 3)) == [5, 3, 9]


def test_names_from_a_script_cannot_steer_the_terminal() -> None:
    drawn = "\n".join(lines_of(report(holders=(("\x1b[2J[bold]x.py", GIB),))))

    assert "\x1b" not in drawn
    assert "[bold]x.py" in drawn


def test_one_case_alone_is_its_panel_and_several_have_their_table() -> None:
    first, second, third = cases(3)
    alone, several = (LiveMemoryTable(console(terminal=True)) for _ in range(2))
    alone.planned([first])
    several.planned([first, second, third])
    assert text_of(alone).strip() == "getting ready …"
    for view in (alone, several):
        view.started(first)
        view.reported(first, report())
        view.noted(first, "step 2: peak 9.00 GiB")
        view.reported(second, report())
    several.finished(third, MEASURED)

    assert "model0" in text_of(alone)
    assert "state" not in text_of(alone)
    assert "step 2: peak 9.00 GiB" in text_of(alone)
    drawn = text_of(several)
    assert drawn.count("now   peak") == 1, "a case that has not started has no panel"
    assert "measured" in drawn
    assert "waiting" in drawn
    several.finished(first, MEASURED)
    assert "now   peak" not in text_of(several)


def test_the_view_is_no_longer_than_the_terminal() -> None:
    many = cases(40)
    holders = tuple((f"line {number}", GIB) for number in range(8))
    for height in (24, 30, 50):
        view = LiveMemoryTable(console(terminal=True, height=height))
        view.planned(many)
        for case in many[:4]:
            view.started(case)
            view.reported(case, report(holders=holders))
            view.noted(case, "goes on")
        assert len(text_of(view, height).splitlines()) <= height


def test_a_pipe_and_a_dumb_terminal_get_lines(monkeypatch) -> None:
    [case] = cases(1)
    for terminal, term in ((False, "xterm"), (True, "dumb")):
        monkeypatch.setenv("TERM", term)
        where = console(terminal=terminal)
        with shown(where, live=True, as_lines=True) as progress:
            assert type(progress) is ProgressLines
            assert not progress.is_live
            progress.planned([case])
            progress.started(case)
            progress.reported(case, report())
            progress.finished(case, MEASURED)
        assert where.file.getvalue().splitlines() == ["[1/1] model0, fewbit:3: peak 3.00 GiB"]


def test_a_terminal_gets_the_view_and_what_a_script_prints_above_it(tmp_path) -> None:
    where = console(terminal=True)
    with shown(where, live=True, as_lines=True) as progress, (tmp_path / "out").open("w") as file:
        assert isinstance(progress, LiveMemoryTable)
        assert progress.is_live
        assert progress.stream(file) is file, "what is no terminal is written to as it is"
