"""Loops in cells of a notebook, on a simulated card."""

from __future__ import annotations

import builtins
import json
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cells import Shell, code_cells

import actbench
from actbench.display import cell_line
from actbench.errors import UntraceableError, UsageError
from actbench.run.cellprogress import shown_in_cell

EXAMPLE = Path(__file__).parents[3] / "examples" / "notebook.ipynb"
LOOP = """
net = torch.nn.Linear(256, 256, device="cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(100):
    loss = net(torch.zeros(1024, 256, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Balanced(HTMLParser):
    """Checks that each tag is closed in its turn, and keeps what is read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.stack += [] if tag == "br" else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += "" if self.stack[-1:] == ["style"] else data


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    made = Shell(tmp_path)
    made.run("import torch\nimport actbench\n%load_ext actbench")
    return made


def test_the_loop_of_a_cell_ends_by_itself_and_shows_what_a_step_needs(shell: Shell) -> None:
    card = shell.run(f"%%actbench rtx-4090 --memory-limit 64MiB\n{LOOP}")

    assert shell.user_ns["card"] is card
    assert card.fits
    assert card.peak_bytes > 256 * 256 * 4
    assert shell.user_ns["step"] < 10
    shown = Balanced(card._repr_html_()).words
    assert "rtx-4090" in shown
    assert "of 64.00 MiB: it fits" in shown
    assert repr(card).startswith("<simulated rtx-4090: peak ")
    lines = {holder.line for holder in card.timeline().holders}
    assert any("net = torch.nn.Linear" in (line or "") for line in lines), "lines of the cell are named"


def test_a_cell_runs_twice_and_after_real_training_in_the_same_kernel(shell: Shell) -> None:
    real = LOOP.replace('"cuda"', '"cpu"').replace("range(100)", "range(2)")
    first = shell.run(f"%%actbench rtx-4090\n{LOOP}")
    shell.run(real)
    trained = shell.user_ns["net"].weight.sum().item()
    second = shell.run(f"%%actbench rtx-4090\n{LOOP}")

    assert first.peak_bytes == second.peak_bytes
    assert trained != 1.0
    shell.run(real)
    assert torch.isfinite(shell.user_ns["loss"])


def test_values_are_refused_once_the_simulation_is_over(shell: Shell) -> None:
    shell.run(f"%%actbench rtx-4090\n{LOOP}")

    for asked in ("loss.item()", "net.weight.sum().item()", "bool((net.weight > 0).all())", "net.weight.tolist()"):
        with pytest.raises(UntraceableError, match="has no values"):
            shell.run(asked)
    assert "FakeTensor" in repr(shell.user_ns["net"].weight)


def test_a_step_that_does_not_fit_is_a_warning_of_a_block_and_shown_in_red(shell: Shell) -> None:
    card = shell.run(f"%%actbench rtx-4090 --memory-limit 1MiB\n{LOOP}")

    assert not card.fits
    assert 'class="missing"' in card._repr_html_()
    block = f'with actbench.simulate("rtx-4090", memory_limit_bytes=2**20) as card:\n{LOOP}'.replace("\n", "\n    ")
    with pytest.warns(UserWarning, match=r"rtx-4090: a step does not fit: it needs .* more than 1.00 MiB"):
        shell.run(block)


@pytest.mark.parametrize(
    ("line", "naming"),
    [
        ("", "the following arguments are required: device_profile"),
        ("rtx-4090 --schme x", "unrecognized arguments: --schme x"),
        ("rtx-4090 --memory-limit much", "much"),
        ("rtx-9999", "rtx-9999"),
    ],
)
def test_a_wrong_line_is_refused_before_the_cell_runs(shell: Shell, line: str, naming: str) -> None:
    with pytest.raises(UsageError, match=naming):
        shell.run(f"%%actbench {line}\nran = True")
    assert "ran" not in shell.user_ns


def test_an_error_of_the_cell_is_the_users(shell: Shell) -> None:
    with pytest.raises(ZeroDivisionError):
        shell.run("%%actbench rtx-4090\n1 / 0")
    assert "no training step ended" in shell.user_ns["card"]._repr_html_()
    assert shell.run(f"%%actbench rtx-4090\n{LOOP}").fits


@pytest.mark.slow
def test_the_cells_of_the_example_run_and_show_tables(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shown = [shell.run(text) for text in code_cells(EXAMPLE)]

    drawn = [Balanced(each._repr_html_()).words for each in shown if hasattr(each, "_repr_html_")]
    assert len(drawn) == 5
    assert "checkpoint" in drawn[2]
    assert "checkpoint" in drawn[3], "of a fit"
    assert (False, shell.user_ns["card"].peak_bytes) in shown
    assert shell.user_ns["offloaded"].fits
    assert all(not cell.get("outputs") for cell in json.loads(EXAMPLE.read_text())["cells"])


def test_a_model_is_measured_by_its_name_with_schemes() -> None:
    found = actbench.measure("tiny-bert", batch_size=2, schemes=["checkpoint", "fewbit:3,functions=relu"])

    exact, scheme = found["exact"], found["checkpoint"]
    assert list(found) == ["exact", "checkpoint", "fewbit:3,functions=relu"]
    assert exact.kind == scheme.kind == "measured"
    assert scheme.activation_bytes < exact.activation_bytes
    assert found["fewbit:3,functions=relu"].kind == "failed"
    words = Balanced(found._repr_html_()).words
    assert "tiny-bert, batch 2" in words
    assert "nothing-converted" in words
    assert "Peak" in Balanced(exact._repr_html_()).words


@pytest.mark.parametrize(
    ("given", "naming"),
    [
        ({"case": "tiny-bertt"}, "did you mean tiny-bert"),
        ({"case": "tiny-bert", "batchsize": 8}, "did you mean batch_size"),
        ({"case": "tiny-bert", "batch_size": 0}, "batch_size"),
        ({"case": "tiny-bert", "schemes": "checkpoint"}, "schemes is a list"),
        ({"case": "tiny-bert", "schemes": ["chekpoint"]}, "did you mean 'checkpoint'"),
        ({"case": actbench.Case(model="tiny-bert", batch_size=1), "schemes": ["checkpoint"]}, "the case says all of"),
        ({"case": 3}, "the name of a model"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], naming: str) -> None:
    with pytest.raises(actbench.ActbenchError, match=naming):
        actbench.measure(**given)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the line of progress of a cell has shown in a kernel, which stands in for IPython's."""
    lines: list[str] = []
    display = ModuleType("IPython.display")
    vars(display).update(HTML=lambda text: text, display=lambda text, display_id: SimpleNamespace(update=lines.append))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(builtins, "get_ipython", lambda: SimpleNamespace(kernel=None), raising=False)
    return lines


def test_a_cell_shows_what_goes_on_and_nothing_of_it_in_the_end(shell: Shell, told: list[str]) -> None:
    shell.run(f"%%actbench rtx-4090\n{LOOP}")

    assert any("first step" in line or "step 1: peak " in line for line in told)
    assert told[-1] == ""
    told.clear()
    actbench.measure("tiny-bert", batch_size=2, schemes=["checkpoint"])
    assert [line.partition(">")[2].partition("<")[0] for line in told] == [
        "[1/2] tiny-bert, exact …",
        "[2/2] tiny-bert, checkpoint …",
        "",
    ]


@pytest.mark.slow
def test_a_fit_in_a_cell_shows_what_it_simulates(told: list[str]) -> None:
    actbench.fit("tiny-bert", device_profile="rtx-4090", batch_size=2, jobs=1, budget_seconds=60.0)

    assert any("trying single changes: " in line and "; best " in line for line in told)
    assert told[-1] == ""


def test_progress_of_cases_in_a_cell_is_one_line_and_messages_stay(
    told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (actbench.Case(model="tiny-bert", scheme=each, batch_size=2) for each in ("exact", "checkpoint"))
    with shown_in_cell() as progress:
        progress.planned([first, second], more=True)
        progress.started(first)
        progress.doing("trying <usual> stacks")
        progress.message("a note")
        while "first step" not in (told or [""])[-1]:
            time.sleep(0.05)

    assert "trying &lt;usual&gt; stacks; tiny-bert, exact: first step (" in told[-2]
    assert capsys.readouterr().err == "a note\n"


def test_outside_of_a_notebook_no_line_is_shown(
    told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builtins, "get_ipython", SimpleNamespace)  # of IPython in a terminal
    with cell_line() as tell, shown_in_cell() as progress:
        progress.doing("it")

    assert tell is None
    assert told == []
    assert capsys.readouterr() == ("", "")
