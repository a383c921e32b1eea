"""How launched processes find each other: what is said of those that do not come, or have another actbench."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from actbench.errors import MeasurementError
from actbench.tools.ranks import rendezvous
from actbench.tools.ranks.follower import Hello


@pytest.mark.parametrize("seconds", [0.0, 0.01])  # without any time left accept() raises another error
def test_processes_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(rendezvous, "_MEETING_SECONDS", seconds)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(MeasurementError, match="of 3 launched processes, number 1, 2 did not connect"),
    ):
        rendezvous._gather(listener, b"", 3, [])


def come(versions: str) -> list[Any]:
    return [SimpleNamespace(hello=Hello(rank=1, local_rank=0, host="far", versions=versions))]


def test_other_files_are_refused_though_they_have_the_same_version_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = rendezvous._versions()
    rendezvous._check(come(mine))
    monkeypatch.setattr(rendezvous, "sources", lambda: "0123456789abcdef" * 4)
    other = rendezvous._versions()
    monkeypatch.undo()

    assert other.partition(" (")[0] == mine.partition(" (")[0]
    with pytest.raises(MeasurementError, match=r"process 1, on far, has .*files 0123456789ab\).*install the same"):
        rendezvous._check(come(other))
