"""A fork server that cannot begin, or that nobody needs any more before it has begun."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from actbench.errors import MeasurementError
from actbench.run.processes import ForkServer


def test_a_server_whose_module_cannot_be_imported_says_why() -> None:
    with (
        ForkServer("no_such_bench") as server,
        pytest.raises(MeasurementError, match=r"cannot be started:\n[^$]*No module named 'no_such_bench'"),
    ):
        server.fork()


def test_a_server_that_still_imports_is_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endlessbench.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)

    with ForkServer("endlessbench") as server:
        pass

    assert server._server.returncode == -signal.SIGTERM  # SIGKILL comes a minute later


def test_a_server_is_ready_once_it_has_imported_what_it_is_told_at_its_start_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "emptybench.py").write_text("")
    for name in ("early", "late"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'x').close()\n")
    monkeypatch.syspath_prepend(tmp_path)

    with ForkServer("emptybench", ("no_such_module", "early")) as server:
        server.ready(also=("no_such_module", "late"))
        server.ready(also=("early",))

    assert (tmp_path / "early").exists()
    assert (tmp_path / "late").exists()
