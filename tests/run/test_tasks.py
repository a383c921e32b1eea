from __future__ import annotations

import pytest

from actbench.errors import ConversionError, MeasurementError
from actbench.run.tasks import Tasks
from actbench.units import MIB


@pytest.fixture
def tasks(ends):
    with ends(), Tasks("faketasks") as tasks:
        yield tasks


def call(tasks, function, text="", **settings):
    return tasks.call(function, text, doing="doing it", **settings)


def test_a_task_is_answered_with_what_its_function_returns(tasks):
    text = "x" * 3_000_000 + "\n\x1b–"

    assert call(tasks, "echo", text) == text
    assert call(tasks, "echo", "again") == "again"


def test_what_was_imported_before_is_not_searched_for_garbage(tasks):
    assert int(call(tasks, "frozen")) > 1000


def test_an_error_of_ours_comes_back_as_it_was_with_where_it_arose(tasks):
    with pytest.raises(ConversionError) as refused:
        call(tasks, "refuse", "no such layer")

    assert str(refused.value) == "no such layer"
    assert "in refuse" in "".join(refused.value.__notes__)


def test_a_message_that_is_no_utf_8_comes_back_with_escapes(tasks):
    with pytest.raises(ConversionError) as refused:
        call(tasks, "undecodable", "x")

    assert str(refused.value) == r"\udcffx"


ENDS = {
    "break_down": ("x", {}, "doing it failed: KeyError: 'x'"),
    "leave": ("0", {}, "doing it failed: SystemExit: 0"),
    "rude": ("", {}, "doing it failed: RudeError: its message cannot be read"),
    "from_itself": ("x", {}, "doing it failed: KeyError: 'x'"),
    "undecodable_answer": ("x", {}, "doing it failed: PydanticSerializationError"),
    "vanish": ("0", {}, "doing it: its process ended by itself with exit code 0"),
    "hoard": (str(2**36), {"memory_bytes": 256 * MIB}, "more memory than the 256.00 MiB .* --memory-limit"),
    "hoard_in_torch": ("7", {}, "more memory than the"),
    "garble": ("x" * 40, {}, "something else than an answer"),
}


@pytest.mark.sampled(fast=3, slow=4)
@pytest.mark.parametrize("function", ENDS)
def test_any_other_end_of_a_task_is_one_error(tasks, function):
    text, settings, message = ENDS[function]
    with pytest.raises(MeasurementError, match=message):
        call(tasks, function, text, **settings)


def test_a_task_that_takes_too_long_takes_back_what_it_began(tasks, tmp_path):
    file = tmp_path / "partial"
    with pytest.raises(MeasurementError, match="longer than --timeout 1 s"):
        call(tasks, "stage", str(file), timeout_seconds=1.0)

    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_task_takes_back_what_it_began(tasks, tmp_path, monkeypatch):
    from actbench.run.processes import Process

    def interrupted(process, request, timeout_seconds):
        process._frames.send(request)
        while not list(tmp_path.iterdir()):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(Process, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(tasks, "stage", str(tmp_path / "partial"))

    assert list(tmp_path.iterdir()) == []
