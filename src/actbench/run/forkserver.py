"""The fork server: a process that has imported what cases need and forks one process for each of them.

It is single-threaded, touches neither CUDA nor a thread pool, and only forks, kills and reaps. For each process its
parent sends three descriptors: the connection over which the process works, its *monitor* socket, and a file for its
standard output and error. The server writes the exit code to the monitor when the process ends. It kills the process
with all its children when the other end of the monitor is closed, which the kernel does too when the parent is killed;
a byte on the monitor asks the process to end by itself. What a process leaves behind, in other sessions too, becomes
the server's child and is killed. So nothing outlives the parent.

On macOS it imports nothing before it forks, since Apple's libraries, which torch calls, may not be used in a fork of a
process that has begun to use them: each process imports what it needs. What leaves its group there is not killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import NoReturn

import psutil

from actbench.run.frames import TOKEN_BYTES, Frames
from actbench.run.worker import work

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_forks_libraries = sys.platform != "darwin"
_can_look_at_ended = hasattr(os, "waitid")  # which macOS has since Python 3.13


def die_with(parent: int, signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; elsewhere closed monitors do that."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Make descendants children of this process when those between end, so that no double fork escapes."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(spared: Container[int] = ()) -> int:
    """Kill the children of this process but those in ``spared``, and return how many were killed.

    None where the system does not list them. Their own children become those of this process if it adopts orphans.
    """
    killed = 0
    with suppress(psutil.Error):
        for child in psutil.Process().children():  # type: ignore[no-untyped-call]
            if child.pid not in spared:
                with suppress(OSError):
                    os.kill(child.pid, signal.SIGKILL)
                    killed += 1
    return killed


READY = b"r"
FORK = b"f"
STOP = b"s"
DESCRIPTORS = 3


def main(arguments: Sequence[str]) -> None:
    """Serve until the parent closes the control socket or ends.

    The arguments are the descriptor of the control socket, the parent's process id, the module that
    measures cases or does tasks, and further modules to import before forking, where that is possible. A line over the
    socket, a JSON list of two lists, has modules to import before forking of which the parent learned meanwhile, and
    modules that the first process does without: they are imported while it works.
    """
    descriptor, parent, bench, *preload = arguments
    die_with(int(parent), signal.SIGTERM)
    adopt_orphans()
    control = socket.socket(fileno=int(descriptor))
    before_fork: Callable[[], object] | None = None
    with _without_garbage():
        if _forks_libraries:
            module = importlib.import_module(bench)
            getattr(module, "before_forks", lambda: None)()
            before_fork = getattr(module, "before_fork", None)
            _import(preload)
        with control.makefile("rb") as told:
            also, after_first = json.loads(told.readline() or "[[], []]")  # empty if the parent is gone
        if _forks_libraries:
            _import(also)
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    control.sendall(READY)
    _Server(control, bench, before_fork, after_first if _forks_libraries else ()).serve()


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Spare imports inside the block a fifth of their time: they make millions of objects, and no garbage."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()  # or each process would search again, and copy, what was imported here


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        with suppress(Exception):  # the case that needs it says what is wrong
            importlib.import_module(module)


class _Server:
    def __init__(
        self,
        control: socket.socket,
        bench: str,
        before_fork: Callable[[], object] | None,
        after_first: Sequence[str],
    ) -> None:
        self._control = control
        self._bench = bench
        self._before_fork = before_fork
        self._after_first = [*after_first]
        self._has_forked = False
        self._pid = os.getpid()
        self._monitors: dict[int, socket.socket] = {}
        self._killed: set[int] = set()
        self._ending = False
        self._wakeup, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end_soon)
        try:
            while not self._ending:
                self._react()
        finally:
            if os.getpid() == self._pid:  # a fork that came this far must not take the other cases with it
                self._end_all()

    def _end_soon(self, *_: object) -> None:
        """Note a SIGTERM; raising could interrupt the killing of what was started."""
        self._ending = True

    def _end_all(self) -> None:
        for pid in self._monitors:
            _kill(pid)
        with suppress(ChildProcessError):  # none is left
            while True:
                kill_children()
                os.waitpid(-1, 0)

    def _react(self) -> None:
        """React to what is ready; while the first process works, import one more module, and fork no other."""
        held = {monitor: pid for pid, monitor in self._monitors.items() if pid not in self._killed}
        is_importing = self._has_forked and bool(self._after_first)
        sources = [self._wakeup, *held] if is_importing else [self._control, self._wakeup, *held]
        found = wait(sources, 0 if is_importing else None)
        if is_importing and not found:
            with _without_garbage():
                _import([self._after_first.pop(0)])
        for ready in found:
            if ready is self._control:
                self._fork()
            elif ready is self._wakeup:
                self._wakeup.recv(4096)
                self._reap()
            elif isinstance(ready, socket.socket) and held[ready] in self._monitors:
                self._pull(held[ready])

    def _pull(self, pid: int) -> None:
        """Ask a process to end, or kill it where the other end of its monitor is closed."""
        if self._monitors[pid].recv(1):
            os.kill(pid, signal.SIGTERM)
        else:
            self._killed.add(pid)
            _kill(pid)

    def _fork(self) -> None:
        said, descriptors, _, _ = socket.recv_fds(self._control, len(FORK) + TOKEN_BYTES, DESCRIPTORS)
        if not descriptors:
            self._ending = True  # the parent closed its end or was killed
            return
        connection, monitor, output = descriptors
        if self._before_fork is not None:
            self._before_fork()
        pid = os.fork()
        if pid == 0:
            self._become_worker(connection, said.removeprefix(FORK), monitor, output)
        _lead_group(pid)
        os.close(connection)
        os.close(output)
        self._monitors[pid] = socket.socket(fileno=monitor)
        self._has_forked = True

    def _become_worker(self, connection: int, token: bytes, monitor: int, output: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            _lead_group(0)
            die_with(self._pid, signal.SIGKILL)
            adopt_orphans()
            os.set_inheritable(connection, False)
            os.close(monitor)
            for held in (self._control, self._wakeup, self._waker, *self._monitors.values()):
                held.close()
            _redirect(output)
            if not self._ending:  # else it was asked to end before it could hear that
                work(Frames(socket.socket(fileno=connection), token), importlib.import_module(self._bench))
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                for stream in (sys.stdout, sys.stderr):
                    with suppress(Exception):  # the model closed it or the disk is full: what it said last is lost
                        stream.flush()
            finally:
                os._exit(code)

    def _reap(self) -> None:
        while (ended := _reaped()) is not None:
            pid, status = ended
            kill_children(spared=self._monitors.keys() - {pid})
            self._killed.discard(pid)
            monitor = self._monitors.pop(pid, None)
            if monitor is not None:
                with monitor, suppress(BrokenPipeError, ConnectionResetError):  # the parent did not wait for it
                    monitor.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _reaped() -> tuple[int, int] | None:
    """Reap a child that has ended, and kill what it leaves in its group; return its id and status, or None."""
    try:
        if not _can_look_at_ended:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return None
            with suppress(PermissionError, ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # while someone is in the group, its id is no one else's
            return pid, status
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    _kill(ended.si_pid)  # while it is unreaped, its id is no one else's: what it started ends with it
    return os.waitpid(ended.si_pid, 0)


def _lead_group(pid: int) -> None:
    """Make a process the leader of a group; both sides do, so that neither waits for the other."""
    with suppress(PermissionError, ProcessLookupError):  # it already ended
        os.setpgid(pid, pid)


def _kill(pid: int) -> None:
    """Kill a child and its group, which it may have left."""
    for kill in (os.killpg, os.kill):
        with suppress(PermissionError, ProcessLookupError):  # it already ended
            kill(pid, signal.SIGKILL)


def _redirect(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
