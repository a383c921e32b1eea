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


@pytest.mark.parametrize("preload", [("noted",), None], ids=["at its start", "later"])
def test_a_server_imports_what_it_is_told_before_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: tuple[str, ...] | None
) -> None:
    (tmp_path / "emptybench.py").write_text("")
    (tmp_path / "noted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'x').close()\n")
    monkeypatch.syspath_prepend(tmp_path)

    with ForkServer("emptybench", preload) as server:
        server.ready(("no_such_module",) if preload else ("no_such_module", "noted"))
        server.ready(("no_such_module",))

    assert (tmp_path / "imported").exists()
