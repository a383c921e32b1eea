"""A run of pytest with options for the mark: the table at its end, and peaks that are kept for the next run."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actbench.errors import ActbenchError
from actbench.report.render import exports, screen
from actbench.report.tables.table import Table, fill
from actbench.report.tables.values import Column, quotient
from actbench.tools.pytest import baseline
from actbench.tools.pytest.baseline import Baseline, Reading

MARK = "gpu_memory"


@dataclass(frozen=True)
class Threshold:
    """By what share a peak may grow, and how it was written."""

    text: str
    share: float


BEFORE = pytest.StashKey[Mapping[str, Reading]]()
"""What tests needed in their last passing runs, by node id."""

THRESHOLD = pytest.StashKey[Threshold]()
"""How much more they may need."""

_SENT = "gpu_memory_before"


def configure(config: pytest.Config) -> None:
    """Read the options; a process of pytest-xdist gets what the first process read.

    Raises:
        pytest.UsageError: An option cannot be used.
    """
    name, growth = config.getoption("gpu_memory_baseline"), config.getoption("gpu_memory_fail_on_increase")
    if growth is not None:
        if name is None:
            raise pytest.UsageError(
                f"--gpu-memory-fail-on-increase {growth}: name the peaks to compare with by --gpu-memory-baseline FILE"
            )
        config.stash[THRESHOLD] = _threshold(growth)
    if (sent := getattr(config, "workerinput", None)) is not None:
        config.stash[BEFORE] = Baseline.model_validate_json(sent[_SENT]).tests
        return
    path = None if name is None else config.invocation_params.dir / name
    try:
        if path is not None:
            exports.check_writable(path)
        config.stash[BEFORE] = {} if path is None else baseline.read(path)
    except ActbenchError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(
        _Run(config.stash[BEFORE], path, shows=config.getoption("gpu_memory")), "actbench_run"
    )


def _threshold(text: str) -> Threshold:
    if not re.fullmatch(r"\d+(\.\d+)?\s*%", text):
        raise pytest.UsageError(f"--gpu-memory-fail-on-increase {text!r}: write a share of the peak, such as 2%")
    return Threshold(text, float(text.rstrip("% ")) / 100)


@dataclass(frozen=True)
class _Row:
    test: str
    found: Reading
    before: Reading | None


_COLUMNS: tuple[Column[_Row], ...] = (
    Column("test", "Test", "text", lambda row: row.test),
    Column("device", "Device", "text", lambda row: row.found.device),
    Column("peak", "Peak", "text", lambda row: row.found.peak),
    Column("needed_bytes", "Needed", "bytes", lambda row: row.found.needed_bytes),
    Column("limit_bytes", "Limit", "bytes", lambda row: row.found.limit_bytes),
    Column("share", "Of the limit", "share", lambda row: quotient(row.found.needed_bytes, row.found.limit_bytes)),
    Column("before", "Last passing run", "text", lambda row: row.before.peak if row.before else None),
    Column("change", "Change", "text", lambda row: _change(row)),
)


def _change(row: _Row) -> str | None:
    change = row.found.change(row.before) if row.before else None
    return None if change is None else f"{100 * change:+.1f} %"


class _Run:
    """The process that reports: it hears of the tests of all processes."""

    def __init__(self, before: Mapping[str, Reading], path: Path | None, *, shows: bool) -> None:
        self._before, self._path, self._shows = before, path, shows
        self._found: dict[str, Reading] = {}
        self._passed: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send what tests needed before to a process of pytest-xdist."""
        node.workerinput[_SENT] = Baseline(tests=dict(self._before)).model_dump_json()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reading of a test, the last one of a test that runs again."""
        texts = [value for name, value in report.user_properties if name == MARK]
        if report.when == "call" and texts:
            self._found[report.nodeid] = Reading.model_validate_json(str(texts[-1]))
            (self._passed.add if report.passed else self._passed.discard)(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Store the peaks of the tests that passed."""
        passed = {test: reading for test, reading in self._found.items() if test in self._passed}
        if self._path is None or not passed:
            return
        try:
            baseline.merge(self._path, passed)
        except ActbenchError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, if it is asked for."""
        if not self._shows:
            return
        terminalreporter.section("GPU memory, simulated")
        if not self._found:
            terminalreporter.write_line(f"No test with the mark {MARK} came to the end of a training step.")
            return
        text = io.StringIO()
        screen.show(self._table(), Console(file=text, width=terminalreporter._tw.fullwidth))
        terminalreporter.write(text.getvalue())

    def _table(self) -> Table:
        rows = [_Row(test, found, self._before.get(test)) for test, found in sorted(self._found.items())]
        return fill("Peaks of training steps", _COLUMNS, rows)
