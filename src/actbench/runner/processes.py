"""The parent's side of :mod:`actbench.runner.forkserver`: start processes, talk to them, learn how they died."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import IO, Self

from actbench.errors import MeasurementError
from actbench.runner.forkserver import FORK, READY

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from actbench.runner.forkserver import main
main(sys.argv[2:])
"""
# OpenMP threads that wait for work sleep rather than spin, unless the user has said otherwise: a case that waits for
# its turn must not take the processor from the one that is timed. Seen on 2 busy cores: steps 3 to 6 times faster so.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
_NOISE_BYTES = 2000
_ENDING_SECONDS = 5.0


class ProcessDiedError(Exception):
    """The process ended without answering.

    Attributes:
        code: Its exit code; negative, the signal that killed it; None where the fork server was lost with it.
        noise: The last of what it wrote to its standard output and error.
    """

    def __init__(self, code: int | None, noise: str) -> None:
        super().__init__(f"exit code {code}")
        self.code = code
        self.noise = noise


class NoAnswerError(Exception):
    """The process did not answer in time; it is still alive."""


class Process:
    """A forked process that answers requests."""

    def __init__(self, connection: Connection, leash: socket.socket, noise: IO[bytes]) -> None:
        self._connection = connection
        self._leash = leash
        self._noise = noise

    def send(self, request: bytes) -> None:
        """Send a request; one to a process that is gone is noticed by :meth:`receive`."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(request)

    def receive(self, timeout_seconds: float | None) -> bytes:
        """Wait for the answer.

        Raises:
            ProcessDiedError: The process ended without one.
            NoAnswerError: There was none in time.
        """
        ready = wait([self._connection, self._leash], timeout_seconds)
        if not ready:
            raise NoAnswerError
        if self._connection in ready:
            with suppress(EOFError, ConnectionResetError):  # it ended, or is ending: its leash tells how
                return self._connection.recv_bytes()
        raise ProcessDiedError(self._exit_code(), _last(self._noise))

    def end(self) -> None:
        """Let the process end by itself and wait for it; it is killed if it does not."""
        self._connection.close()
        if self._leash.fileno() != -1:
            wait([self._leash], _ENDING_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the process and all its children, and return when it is gone; does nothing to one that ended."""
        self._connection.close()
        if self._leash.fileno() != -1:
            with suppress(OSError):  # the other end is closed where the process has ended
                self._leash.shutdown(socket.SHUT_WR)
            self._exit_code()
            self._leash.close()
            self._noise.close()

    def _exit_code(self) -> int | None:
        try:
            return int(self._leash.recv(16) or b"none")
        except (ValueError, ConnectionResetError):
            return None


class ForkServer:
    """A process that has imported what cases need and from which their processes are forked.

    Args:
        bench: Name of the module that measures cases, imported before forking.
        preload: Names of further modules to import before forking.

    Raises:
        MeasurementError: It cannot be started; the message holds what it wrote.
    """

    def __init__(self, bench: str, preload: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115
        self._control, theirs = socket.socketpair()
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), bench, *preload]
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *arguments],  # -P: nothing is imported from the current folder
                stdin=subprocess.DEVNULL,
                stdout=self._noise,
                stderr=self._noise,
                env=_ENVIRONMENT | os.environ,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in the terminal is for the parent, which then closes this server
            )
        try:
            ready = self._control.recv(1) == READY
        except BaseException:
            self._server.terminate()
            self.close()
            raise
        if not ready:
            self._server.wait()
            raise MeasurementError(f"the process that starts the cases ended at once:\n{_last(self._noise)}")

    def fork(self) -> Process:
        """Start a process that runs :func:`actbench.runner.worker.work`.

        Raises:
            MeasurementError: The server is gone.
        """
        ours, connection = Pipe()
        leash, held = socket.socketpair()
        noise = tempfile.TemporaryFile()  # noqa: SIM115
        with connection, held:
            try:
                with self._lock:
                    descriptors = [connection.fileno(), held.fileno(), noise.fileno()]
                    socket.send_fds(self._control, [FORK], descriptors)
            except OSError:
                raise MeasurementError("the process that starts the cases is gone; run the sweep again") from None
            return Process(ours, leash, noise)

    def close(self) -> None:
        """Kill every process that was forked, with its children, and end the server."""
        self._control.close()
        self._server.wait()
        self._noise.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _last(noise: IO[bytes]) -> str:
    """Return the end of what was written to a file, without moving the offset that its writer shares."""
    start = max(0, os.fstat(noise.fileno()).st_size - _NOISE_BYTES)
    return os.pread(noise.fileno(), _NOISE_BYTES, start).decode(errors="replace").strip()
