"""A fork server that cannot begin, or that nobody needs any more before it has begun."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from actbench.errors import MeasurementError
from actbench.run import processes, worker
from actbench.run.processes import ForkServer
from actbench.run.tasks import Tasks


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


def test_what_the_first_process_does_without_is_imported_while_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked.py").write_text("import sys\ndef has(name):\n    return str(name in sys.modules)\n")
    (tmp_path / "later.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    with ForkServer("asked") as server:
        server.ready(after_first=("later", "no_such_module"))
        first, second = (Tasks("asked", server=server).call("has", "later", doing="asking") for _ in range(2))

    assert (first, second) == ("False", "True")


def test_a_server_that_imports_while_the_first_process_works_still_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [f"later{number}" for number in range(60)]
    (tmp_path / "quick.py").write_text("def echo(text):\n    return text\n")
    for name in modules:
        text = f"import time\ntime.sleep(0.1)\nopen({str(tmp_path / name)!r} + '.done', 'x').close()\n"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    with ForkServer("quick") as server:
        server.ready(after_first=modules)
        assert Tasks("quick", server=server).call("echo", "here", doing="asking") == "here"

    assert len([*tmp_path.glob("*.done")]) < len(modules)


_OF_MACOS = """
import sys, actbench.run.forkserver as server
server._libc, server._forks_libraries, server._can_look_at_ended = None, False, False
"""


def test_a_server_as_on_macos_imports_nothing_before_it_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_no_process_is_left: Callable[[Path], None]
) -> None:
    (tmp_path / "aloneforks.py").write_text(
        "import os, subprocess, sys\nIMPORTED_BY = os.getpid()\n"
        "def is_its_own(text):\n    return str(os.getpid() == IMPORTED_BY)\n"
        "def begin(text):\n    return str(subprocess.Popen(['tail', '-f', text]).pid)\n"
        "def end(text):\n    os._exit(7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(processes, "_START", processes._START.replace("\nfrom", f"{_OF_MACOS}from", 1))

    with Tasks("aloneforks") as tasks:
        assert tasks.call("is_its_own", "", doing="asking") == "True"
        left = int(tasks.call("begin", str(tmp_path / "aloneforks.py"), doing="beginning another"))
        with pytest.raises(MeasurementError, match="exit code 7"):
            tasks.call("end", "", doing="ending")
    assert left
    assert_no_process_is_left(tmp_path / "log")  # it was in the group of a process that ended


def test_a_module_that_cannot_be_imported_ends_its_process_as_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START", processes._START.replace("\nfrom", f"{_OF_MACOS}from", 1))
    with Tasks("no_such_bench") as tasks, pytest.raises(MeasurementError, match="No module named 'no_such_bench'"):
        tasks.call("f", "", doing="doing it")


def test_memory_is_limited_on_linux_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(worker.resource, "setrlimit", lambda kind, limits: asked.append(limits))
    worker.limit_memory(1000)
    assert len(asked) == 1
    monkeypatch.setattr(worker.sys, "platform", "darwin")
    worker.limit_memory(1000)
    assert len(asked) == 1
