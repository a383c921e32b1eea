"""The parent's side of the fork server: start processes, talk to them, learn how they ended."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import IO, Self

from actbench.errors import MeasurementError
from actbench.run.forkserver import FORK, READY, STOP
from actbench.run.frames import TOKEN_BYTES, Frames, GarbledError
from actbench.units import LONGEST_SECONDS

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from actbench.run.forkserver import main
main(sys.argv[2:])
"""
# OpenMP threads that wait for work sleep rather than spin, unless the user has said otherwise: a case that waits for
# its turn must not take the processor from the one that is timed. Seen on 2 busy cores: steps 3 to 6 times faster so.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
if sys.platform == "darwin":  # else a process that a script's trial is forked from ends with the first class of Apple's
    _ENVIRONMENT["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"
_OUTPUT_BYTES = 2000
_TRACEBACK_BYTES = 100_000
_ENDING_SECONDS = 5.0
_STOPPING_SECONDS = 30.0  # it may be in the middle of writing a large file
_KILLING_SECONDS = 60.0  # a process with much memory takes its time to give it back
_STARTING_SECONDS = 600.0


class ProcessDiedError(Exception):
    """The process ended without answering, with the last of its output.

    ``code`` is its exit code, or minus the signal that killed it; None where the fork server was lost with it.
    """

    def __init__(self, code: int | None, output: str) -> None:
        super().__init__(f"exit code {code}")
        self.code = code
        self.output = output


class NoAnswerError(Exception):
    """The process did not answer in time; it is still alive."""


class Process:
    """A forked process that answers requests.

    ``monitor`` tells how it ended, and ends it when closed; see :mod:`actbench.run.forkserver`. ``wake``
    wakes the fork server, should something have stopped it.
    """

    def __init__(self, frames: Frames, monitor: socket.socket, output: IO[bytes], wake: Callable[[], None]) -> None:
        self._frames = frames
        self._monitor = monitor
        self._output = output
        self._wake = wake

    def ask(self, request: bytes, timeout_seconds: float | None) -> bytes:
        """Send a request and wait for the whole answer.

        Raises:
            ProcessDiedError: The process ended without one.
            NoAnswerError: There was none in time.
            GarbledError: Something else than an answer came, or no answer can come any more.
        """
        deadline = deadline_after(timeout_seconds)
        self.send(request, deadline)
        while True:
            if not wait(self.sources, left_until(deadline)):
                raise NoAnswerError
            if (answer := self.read(deadline)) is not None:
                return answer

    @property
    def sources(self) -> list[socket.socket]:
        """The file descriptors to wait for: one becomes ready when :meth:`read` has data."""
        return [self._frames.socket, self._monitor]

    def send(self, request: bytes, deadline: float | None) -> None:
        """Send a request; a NoAnswerError if the process does not take it until the deadline."""
        with suppress(BrokenPipeError, ConnectionResetError):  # what is sent to a process that is gone is noticed later
            try:
                self._frames.send(request, left_until(deadline))
            except (TimeoutError, BlockingIOError):
                raise NoAnswerError from None

    def read(self, deadline: float | None) -> bytes | None:
        """Return the answer once it is whole; to be called when one of ``sources`` is ready.

        Raises:
            ProcessDiedError: The process ended without one.
            GarbledError: Something else than an answer came, or no answer can come any more.
        """
        if self._frames.socket not in wait(self.sources, 0):
            raise self._death()
        try:
            return self._frames.read()
        except (EOFError, ConnectionResetError):
            raise self._silence(deadline) from None

    def _silence(self, deadline: float | None) -> Exception:
        """Return what became of a process whose end of the connection is closed."""
        left = left_until(deadline)
        if wait([self._monitor], _ENDING_SECONDS if left is None else min(left, _ENDING_SECONDS)):
            return self._death()
        return GarbledError("nothing: it closed the descriptor over which it answers")

    def _death(self) -> ProcessDiedError:
        try:
            code = int(self._monitor.recv(16))
        except (ValueError, ConnectionResetError):
            code = None
        return ProcessDiedError(code, self.said)

    @property
    def said(self) -> str:
        """The end of its output on standard output and error."""
        return _last(self._output)

    @property
    def written(self) -> str:
        """What it wrote, a traceback too; of very much the last."""
        return _last(self._output, _TRACEBACK_BYTES)

    def stop(self) -> None:
        """Ask the process to clean up and end; it is killed if it does not."""
        with suppress(OSError):
            self._monitor.send(STOP)
        self._wake()
        wait([self._monitor], _STOPPING_SECONDS)
        self.end()

    def end(self) -> None:
        """Let the process end by itself; it is killed if it does not."""
        self._wake()
        self._frames.close()
        if self._monitor.fileno() != -1:
            wait([self._monitor], _ENDING_SECONDS)
        self.kill()

    def interrupt(self) -> None:
        """Have the process and its descendants killed; another thread may wait for an answer, which learns of it."""
        self._wake()
        with suppress(OSError):  # it has ended
            self._monitor.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill the process and all its descendants, and wait until it is gone.

        What even the kernel cannot end, because a device does not let go of it, is not waited for.
        """
        self._wake()
        self._frames.close()
        if self._monitor.fileno() != -1:
            with suppress(OSError):  # the other end is closed where the process has ended
                self._monitor.shutdown(socket.SHUT_WR)
            wait([self._monitor], _KILLING_SECONDS)
            self._monitor.close()
            self._output.close()


class ForkServer:
    """A process that imports ``bench`` and ``preload``, and from which processes are forked.

    Each measures a case or does a task; see :mod:`actbench.run.worker`. The imports take seconds, in which this
    process can do something else: the first :meth:`fork` waits for their end.
    """

    def __init__(self, bench: str, preload: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._control, theirs = socket.socketpair()
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), bench, *preload]
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *arguments],  # -P: nothing is imported from the current folder
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=_ENVIRONMENT | os.environ,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in the terminal is for the parent, which then closes this server
            )
        self._is_ready = False

    def ready(self, also: Sequence[str] = (), after_first: Sequence[str] = ()) -> Self:
        """Return this server once it has imported everything, what the first caller names ``also`` too.

        What it names ``after_first`` is imported while the first process works.

        Raises:
            MeasurementError: It cannot, with what it wrote.
        """
        with self._lock:
            if self._is_ready:
                return self
            try:
                with suppress(BrokenPipeError, ConnectionResetError):  # it ended before it read the line
                    self._control.sendall(json.dumps([also, after_first]).encode() + b"\n")
                    self._is_ready = bool(wait([self._control], _STARTING_SECONDS)) and self._control.recv(1) == READY
            finally:
                if not self._is_ready:
                    said = _last(self._output)
                    self.close()
        if not self._is_ready:
            raise MeasurementError(f"the process that starts all others cannot be started:\n{said}")
        return self

    def fork(self) -> Process:
        """Start a process; a MeasurementError if the server is gone or cannot be started."""
        self.ready()
        self._wake()
        ours, connection = socket.socketpair()
        monitor, held = socket.socketpair()
        token = secrets.token_bytes(TOKEN_BYTES)
        output = tempfile.TemporaryFile()  # noqa: SIM115
        with connection, held:
            try:
                with self._lock:
                    descriptors = [connection.fileno(), held.fileno(), output.fileno()]
                    socket.send_fds(self._control, [FORK, token], descriptors)
            except OSError:
                for ours_alone in (ours, monitor, output):
                    ours_alone.close()
                raise MeasurementError("the process that starts all others is gone; run the command again") from None
            return Process(Frames(ours, token), monitor, output, self._wake)

    def close(self) -> None:
        """Kill every forked process with its descendants, and end the server."""
        self._server.terminate()  # it may import, and would learn of the closed socket only afterwards
        self._wake()
        self._control.close()
        try:
            self._server.wait(_KILLING_SECONDS)
        except subprocess.TimeoutExpired:  # it waits for what the kernel cannot end
            self._server.kill()
            self._server.wait()
        self._output.close()

    def _wake(self) -> None:
        """Wake the server, should a case have stopped it."""
        self._server.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def deadline_after(seconds: float | None) -> float | None:
    """Return the deadline by :func:`time.monotonic`, or None."""
    return None if seconds is None else time.monotonic() + min(seconds, LONGEST_SECONDS)


def left_until(deadline: float | None) -> float | None:
    """Return the seconds that are left; None without a deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _last(output: IO[bytes], most: int = _OUTPUT_BYTES) -> str:
    """Return the end of a file, without moving the offset that its writer shares."""
    start = max(0, os.fstat(output.fileno()).st_size - most)
    return os.pread(output.fileno(), most, start).decode(errors="replace").strip()


def describe(death: ProcessDiedError, advice: str = "") -> str:
    """Return how a process ended, as the rest of a sentence; ``advice`` is added where the kernel killed it."""
    code, hint = death.code or 0, ""
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended by itself with exit code {code}"
    if death.code is None:
        how = "is gone, with the one that started it"
    if code == -signal.SIGKILL:
        hint = "; the usual cause is the kernel's out-of-memory killer: try a smaller batch, or close other programs"
        hint += advice
    output = f"\nThe last it wrote:\n{death.output}" if death.output else ""
    return f"{how}{hint}{output}"


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:
        return f"signal {number}"
