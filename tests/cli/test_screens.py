"""What ``report`` prints of the quickstart's records, as text files beside the records.

A snapshot is a text that somebody looked at. After a change that is meant, look at what is printed now, and write it
with ``ACTBENCH_WRITE_SCREENS=1 pytest tests/cli/test_screens.py``.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

DATA = Path(__file__).parents[1] / "data"
RECORDS = DATA / "quickstart-2026-11.jsonl"
WIDTHS = (80, 100, 120, 200)
OTHERS = {
    "fit": ("report", DATA / "fit-llama-2026-11.fit.jsonl", "--title", "What fits"),
    "compare": ("compare", RECORDS, RECORDS),
}
NEVER_LEFT_OUT = {"fit": ("Gradient", "Also", "Fits", "Time", "Need"), "compare": ("Peak change", "Scheme")}
"""Titles of columns that answer the question of a table, as far as there is anything in them."""

COMMAND = (sys.executable, "-m", "actbench", "report", str(RECORDS), "--title", "Quickstart")


def environment(**variables: str) -> dict[str, str]:
    dropped = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", **variables}


@pytest.fixture
def piped(cli: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that returns what a pipe gets."""

    def run(**variables: str) -> str:
        monkeypatch.delenv("COLUMNS", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        text: str = cli(*COMMAND[3:]).out
        return text

    return run


def on_terminal(**variables: str) -> str:
    """Return what a terminal gets, with its escapes."""
    control, terminal = pty.openpty()
    with subprocess.Popen(COMMAND, env=environment(**variables), stdout=terminal, stdin=terminal) as process:
        os.close(terminal)
        parts = []
        while True:
            try:
                part = os.read(control, 65536)
            except OSError:  # Linux says so at the end
                break
            if not part:
                break
            parts.append(part)
        assert process.wait() == 0
    os.close(control)
    return b"".join(parts).decode().replace("\r\n", "\n")


def same_as_snapshot(name: str, text: str) -> None:
    file = DATA / "screens" / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("ACTBENCH_WRITE_SCREENS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "width", [WIDTHS[0], WIDTHS[-1], *(pytest.param(each, marks=pytest.mark.slow) for each in WIDTHS[1:-1])]
)
def test_a_terminal_gets_what_fits_its_width(width: int) -> None:
    text = on_terminal(COLUMNS=str(width), NO_COLOR="1", TERM="dumb")

    assert "\x1b" not in text
    assert max(map(cell_len, text.splitlines())) <= width
    for told in ("exact", "cpu", "simulated", "vit-base-patch16-224@num_hidden_layers=2", "fewbit:3+randomized:0.2"):
        assert told in " ".join(text.split()), "what tells rows apart is never hidden"
    same_as_snapshot(f"quickstart-{width}", text)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_pipe_gets_the_same_lines_as_a_terminal_of_its_width(piped: Callable[..., str], width: int) -> None:
    found = [line.rstrip() for line in piped(COLUMNS=str(width)).splitlines()]

    assert found == (DATA / "screens" / f"quickstart-{width}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("width", [*WIDTHS[:-1], None])
@pytest.mark.parametrize("name", OTHERS)
def test_a_pipe_gets_the_columns_that_answer_at_every_width(
    cli: Any, monkeypatch: pytest.MonkeyPatch, name: str, width: int | None
) -> None:
    """None is a pipe of no known width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    text: str = cli(*OTHERS[name]).out

    assert max(map(cell_len, text.splitlines())) <= (width or 120)
    for title in NEVER_LEFT_OUT[name]:
        assert all(word in text for word in title.split()), title
    same_as_snapshot(f"{name}-{width or 'pipe'}", text)


def test_a_shortened_plan_has_whole_parts(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text: str = cli(*OTHERS["fit"]).out

    rows = [re.sub(r"^ +\d+ ", "", line) for line in text.splitlines() if "…" in line and "GiB" in line]
    shortened = [row.strip().split("  ")[0] for row in rows]
    assert len(shortened) > 3
    for plan in shortened:
        front, back = plan.split("…")
        assert front.endswith(", "), plan
        assert not back or back.startswith(", "), plan


@pytest.mark.parametrize("columns", [{}, {"COLUMNS": "0"}, {"COLUMNS": "wide"}])
def test_a_pipe_of_no_known_width_has_120_columns(piped: Callable[..., str], columns: dict[str, str]) -> None:
    assert piped(**columns) == piped(COLUMNS="120")


@pytest.mark.slow
def test_without_colours_a_terminal_gets_the_same_text() -> None:
    bare = (DATA / "screens" / "quickstart-100.txt").read_text(encoding="utf-8")
    text = on_terminal(COLUMNS="100", NO_COLOR="1")

    assert "\x1b[3" not in text, "no colours"
    assert "resnet50" in text
    assert "\x1b[38" not in on_terminal(COLUMNS="100")
    assert bare.splitlines()[5].strip() in text
