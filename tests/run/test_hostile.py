"""Cases that write where they should not, stop, or leave processes behind: none of them holds the sweep."""

from __future__ import annotations

import socket
import struct

import pytest

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.run import frames
from actbench.run.experiment import Summary
from actbench.run.frames import Frames, GarbledError
from actbench.run.isolated import IsolatedSession
from actbench.run.processes import ForkServer
from actbench.run.recipes.sections import Planned
from actbench.run.runner import run_plan


def cases(log, *schemes, meter="simulated"):
    return [Case(model=str(log), scheme=scheme, batch_size=4, meter=meter, min_seconds=0.0) for scheme in schemes]


class Outcomes(dict):
    """A store in memory that keeps the outcome of each scheme."""

    def done(self, case):
        return False

    failed = done

    def find(self, case):
        return next((record for record in reversed(self.records) if record.case == case), None)

    def append(self, record):
        self[record.case.scheme] = record.outcome


def sweep(plan, timeout_seconds, preload=()):
    rows = Outcomes()
    settings = {"recipe": "test", "command": "test", "bench": "fakebench", "preload": preload}
    return rows, run_plan([Planned(case) for case in plan], rows, timeout_seconds=timeout_seconds, **settings)


@pytest.mark.parametrize(
    "deed",
    [
        "garble:x",
        "garble+sleep:300",
        *(pytest.param(deed, marks=pytest.mark.slow) for deed in ("closefds", "garble", "garble+bug")),
    ],
)
def test_what_is_written_into_the_descriptors_of_a_case_is_a_failed_row(log, ends, deed):
    with ends():
        rows, summary = sweep(cases(log, deed, "exact"), timeout_seconds=40.0)

    assert summary == Summary(measured=1, failed=1)
    assert rows[deed].reason == "crash"
    assert "descriptor" in rows[deed].message


def test_a_library_that_cannot_be_imported_fails_only_cases_that_need_it(log, ends, tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('made for another torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with ends():
        rows, summary = sweep(cases(log, "exact"), 40.0, preload=("broken_library", "missing_library"))

    assert summary == Summary(measured=1), rows


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("deed", ["stop", "stop_server+sleep:300"])
def test_a_case_that_is_stopped_or_stops_its_server_is_a_timeout(log, ends, deed):
    with ends():
        rows, summary = sweep(cases(log, deed, "exact"), timeout_seconds=1.0)

    assert summary == Summary(measured=1, failed=1)
    assert rows[deed].reason == "timeout"


def test_a_server_that_a_case_stopped_goes_on(log, ends):
    with ends():
        rows, summary = sweep(cases(log, "stop_server", "name:a", "name:b"), timeout_seconds=40.0)

    assert summary == Summary(measured=3), rows


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("ending", ["", "+kill", "+stop"])
def test_descendants_with_sessions_of_their_own_end_with_their_case(log, ending, assert_no_process_is_left):
    escaping, other = cases(log, f"escape{ending}", "exact")
    with ForkServer("fakebench") as server, IsolatedSession(server, other, None) as beside:
        assert isinstance(beside.memory(), Measurement)
        with IsolatedSession(server, escaping, 3.0) as session:
            session.memory()
        assert_no_process_is_left(log)

        assert beside.time(2) == (0.25, 0.25)  # another case lives on


@pytest.fixture
def both_ends():
    """Return what reads a socket, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Frames(ours, b"t" * frames.TOKEN_BYTES), theirs


def read_all(end):
    while (message := end.read()) is None:
        pass
    return message


def test_a_message_that_comes_in_pieces_is_read_as_a_whole(both_ends):
    end, other = both_ends
    Frames(other, b"t" * frames.TOKEN_BYTES).send(b"first")
    assert end.read() is None
    assert read_all(end) == b"first"

    whole = b"t" * frames.TOKEN_BYTES + struct.pack("!Q", 6) + b"second"
    for byte in whole[:-1]:
        other.send(bytes([byte]))
        assert end.read() is None
    other.send(whole[-1:])
    assert end.read() == b"second"


@pytest.mark.parametrize("what", [b"x", b"t" * (frames.TOKEN_BYTES - 1) + b"x", b"\0" * 64])
def test_what_does_not_begin_as_a_message_is_recognised_at_once(both_ends, what):
    end, other = both_ends
    other.send(what)

    with pytest.raises(GarbledError, match="something else than an answer"):
        end.read()


def test_a_message_without_measure_is_refused_before_it_is_read(both_ends):
    end, other = both_ends
    other.send(b"t" * frames.TOKEN_BYTES + struct.pack("!Q", frames.MOST_BYTES + 1))

    with pytest.raises(GarbledError, match=f"{frames.MOST_BYTES + 1} bytes"):
        read_all(end)


def test_programs_that_a_case_starts_inherit_no_descriptor_of_its_own(log):
    [case] = cases(log, "descriptors")
    with ForkServer("fakebench") as server, IsolatedSession(server, case, 60.0) as session:
        session.memory()

    assert (log.parent / "descriptors").read_text().split() == ["0", "1", "2"]
