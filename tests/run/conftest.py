"""Where the cases of fakebench write, and what is asked of the processes of a sweep."""

import signal
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from actbench.run import executor


@pytest.fixture(autouse=True)
def _fakebench_is_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(executor, "modules_of_schemes", lambda names: [])  # which import torch: seconds for each server


@pytest.fixture
def ends():
    """Gives a block that fails where it takes minutes, in place of holding the tests for ever."""

    @contextmanager
    def within(seconds=60):
        def give_up(*_):
            raise AssertionError(f"it still runs after {seconds} s")

        before = signal.signal(signal.SIGALRM, give_up)
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return within


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def assert_no_process_is_left():
    """Gives what fails where a process that a sweep began is alive some seconds later."""

    def check(log, seconds=5.0):
        deadline = time.monotonic() + seconds
        while left := [process for process in psutil.process_iter() if _belongs(process, log)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.02)

    return check


def _belongs(process, log):
    try:
        about_us = any(str(log.parent) in argument for argument in process.cmdline())
        return about_us and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
