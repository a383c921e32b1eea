"""How launched processes find each other: what is said of those that do not come, or have another actbench."""

from __future__ import annotations

import socket

import pytest

from actbench.errors import MeasurementError
from actbench.experiments.ranks import rendezvous


@pytest.mark.parametrize("seconds", [0.0, 0.01])  # without any time left accept() raises another error
def test_processes_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(rendezvous, "_MEETING_SECONDS", seconds)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(MeasurementError, match="of 3 launched processes number 1, 2 did not come"),
    ):
        rendezvous._gather(listener, b"", 3, [])
