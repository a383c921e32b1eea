"""Stands in for ``actbench.measuring.bench`` in the tests of the runner: what a case does is in its scheme, its log in
its model.

A scheme is a ``+``-joined list of deeds, such as ``sleep:0.05+kill``; those after ``then`` are done when timing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from actbench import slowsteps
from actbench.errors import ActbenchError, MeasurementError, OutOfMemoryError
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.tools.ranks.launch import Meeting

_SECOND = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', sys.argv[1]]);"
_FIRST = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)"
_LIST = """
import os, sys
def is_open(number):
    try:
        return os.fstat(number)
    except OSError:
        return False
numbers = [str(number) for number in range(64) if is_open(number)]
open(sys.argv[1], "w").write(" ".join(numbers))
"""
BASE_BYTES, SAMPLE_BYTES = 1000, 10


def join(text: str, meter: str) -> None:
    os.environ["FAKE_RANK"] = str(Meeting.model_validate_json(text).rank)


def is_of_others(error: BaseException) -> bool:
    return isinstance(error, ConnectionError)


class Session:
    def __init__(self, case: Case, world: None = None) -> None:
        self.case = case
        self.log = Path(case.model)
        first, _, second = case.scheme.partition("+then+")
        self.deeds, self.deeds_when_timed = first.split("+"), second.split("+") if second else []
        self.peak_bytes = BASE_BYTES + SAMPLE_BYTES * case.batch_size
        self._write("begin")

    def memory(self) -> Measurement:
        for deed in self.deeds:
            self._do(deed)
        limit = self.case.memory_limit_bytes
        over = None if limit is None or self.peak_bytes <= limit else self.peak_bytes - limit
        if over and "strict" in self.deeds:
            raise OutOfMemoryError(f"{self.peak_bytes} > {limit}")
        self._write("memory")
        found = None
        if self.case.meter == "simulated" and self.case.find_largest_batch:
            found = (limit - BASE_BYTES) // SAMPLE_BYTES
        return Measurement(
            weights_bytes=8,
            activation_bytes=9,
            peak_bytes=self.peak_bytes,
            memory_limit_bytes=limit,
            over_limit_bytes=over,
            largest_batch=found,
        )

    def time(self, steps: int) -> tuple[float, ...] | None:
        for deed in self.deeds_when_timed:
            self._do(deed)
        self._write(f"time {steps}")
        return (0.25,) * steps

    def _write(self, event: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{self.case.scheme} {self.case.batch_size} {event}\n")

    def _do(self, deed: str) -> None:
        name, _, value = deed.partition(":")
        getattr(self, name)(value)

    def exact(self, value: str) -> None:
        pass

    name = strict = exact

    def at(self, value: str) -> None:
        """Do a deed on one rank: ``at:1/kill``."""
        rank, _, deed = value.partition("/")
        if os.environ.get("FAKE_RANK", "0") == rank:
            self._do(deed.replace("=", ":"))

    def lost(self, value: str) -> None:
        raise ConnectionError("Connection closed by peer")

    def long(self, value: str) -> None:
        """Simulate a step that takes long from its first operator on."""
        with patch.object(slowsteps, "SLOW_SECONDS", 0.0), slowsteps.followed([], lambda: "forward"):
            slowsteps.operator_ran(())

    def sleep(self, value: str) -> None:
        time.sleep(float(value))

    def hang(self, value: str) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", str(self.log)])
        time.sleep(300)

    def exit(self, value: str) -> None:
        print("last words")
        sys.stdout.flush()
        os._exit(int(value))

    def kill(self, value: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def segfault(self, value: str) -> None:
        ctypes.string_at(0)

    def quit(self, value: str) -> None:
        sys.exit(value)

    def oom(self, value: str) -> None:
        raise OutOfMemoryError("too much", "backward")

    def hog(self, value: str) -> None:
        bytearray(2**50)

    def bug(self, value: str) -> None:
        raise ValueError("a bug")

    def missing(self, value: str) -> None:
        raise MeasurementError("no such device")

    def peak(self, value: str) -> None:
        self.peak_bytes = int(value)

    def noisy(self, value: str) -> None:
        os.write(1, b"noise\n" * 10000)

    def shy(self, value: str) -> None:
        if self.log.read_text().count(f"{self.case.scheme} {self.case.batch_size} begin") == 1:
            raise OutOfMemoryError("crowded")

    def mute(self, value: str) -> None:
        sys.stdout.close()
        sys.stderr.close()

    def garble(self, value: str) -> None:
        """Write into every descriptor that is open, whatever it is; ``value`` is what."""
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.write(descriptor, value.encode() or b"\x7f" * 64)

    def closefds(self, value: str) -> None:
        os.closerange(3, 64)
        time.sleep(300)

    def descriptors(self, value: str) -> None:
        """List the descriptors that a program gets which inherits all that it can."""
        target = str(self.log.parent / "descriptors")
        subprocess.run([sys.executable, "-c", _LIST, target], close_fds=False, check=True)

    def stop(self, value: str) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def stop_server(self, value: str) -> None:
        os.kill(os.getppid(), signal.SIGSTOP)

    def escape(self, value: str) -> None:
        """Start a process of another session whose parent has ended, and leave one's own group."""
        lasting = f"import subprocess, sys, time; {_SECOND} time.sleep(300)"
        subprocess.run([sys.executable, "-c", _FIRST, lasting, str(self.log)], start_new_session=True, check=True)

    def gpu(self, value: str) -> None:
        """Log what ``CUDA_VISIBLE_DEVICES`` is."""
        self._write(f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES', 'as-here')}")

    def meets(self, value: str) -> None:
        """Wait until a case of the batch ``value`` has begun, too."""
        while f" {value} begin" not in self.log.read_text():
            time.sleep(0.01)

    def clockless(self, value: str) -> None:
        self.time = lambda steps: None

    def dies_at(self, value: str) -> None:
        if self.case.batch_size == int(value):
            os._exit(7)


class Trial(Session):
    def __init__(self, case: Case, world: None = None) -> None:
        super().__init__(case)
        self._write("trial")


def failure_of(error: BaseException) -> Failure:
    reason = "crash"
    if isinstance(error, OutOfMemoryError | MemoryError):
        reason = "out-of-memory"
    elif isinstance(error, MeasurementError):
        reason = "unavailable"
    message = str(error) if isinstance(error, ActbenchError) else f"{type(error).__name__}: {error}"
    return Failure(reason=reason, message=message, phase=getattr(error, "phase", None))
