"""One command, from its arguments to its exit status: streams, defaults, warnings, errors."""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TextIO, cast

from actbench.caches import keep_compiled_code_private, own_temporary_folder
from actbench.cli import defaults, launcher
from actbench.errors import ActbenchError, UsageError, shortened
from actbench.plugins import TOLD_BY, PluginWarning
from actbench.report.plain import plain


def run() -> None:
    """Run the command line; exits by the status that :func:`actbench.cli.main` names."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes import nothing from the current folder
    keep_compiled_code_private()
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao warns, which transformers imports
    with tolerant() as out, explained_exits(), _telling_of_plugins():
        try:
            _run(debug="--debug" in sys.argv[1:2])
        finally:
            out.flush()
            if out.error is not None and not isinstance(out.error, BrokenPipeError):  # else the reader has gone
                print(f"actbench: standard output cannot be written: {out.error.strerror}", file=sys.stderr)
                sys.exit(2)


def _find_a_home() -> None:
    """Let a folder of this user in the temporary folder be its home, for all libraries, where none is known."""
    if os.path.isabs(os.path.expanduser("~")):
        return
    os.environ["HOME"] = home = str(own_temporary_folder())
    who = f"HOME is not set, and user {os.getuid()} has no entry in passwd"
    print(f"actbench: there is no home folder ({who}): caches and settings are in {home}", file=sys.stderr)


def _run(*, debug: bool) -> None:
    typed = sys.argv[1:]
    try:
        _find_a_home()
        sys.argv[1:], remarks = defaults.put_before(typed, os.environ)
        for text in remarks:
            print(plain(f"actbench: {shortened(text)}"), file=sys.stderr)
        with _debugging() if debug else nullcontext():
            launcher.run_launched(sys.argv[1:])
    except ModuleNotFoundError as error:
        if debug or error.name != "torch":
            raise
        print("actbench: this command needs torch, which is not installed: pip install torch", file=sys.stderr)
        sys.exit(2)
    except (ActbenchError, OSError) as error:
        if debug:
            raise
        print(plain(f"actbench: {shortened(_message(error))}"), file=sys.stderr)
        if isinstance(error, UsageError) and sys.argv[1:] != typed:
            whole = shlex.join(["actbench", *sys.argv[1:]])
            print(plain(f"actbench: with its defaults, that was: {shortened(whole)}"), file=sys.stderr)
        sys.exit(2)


@contextmanager
def _telling_of_plugins() -> Iterator[None]:
    """Print warnings about plug-ins as remarks: once, and not in the processes that this one starts."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PluginWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **details: Any) -> None:
            if issubclass(category, PluginWarning):
                print(plain(f"actbench: {shortened(str(message))}"), file=sys.stderr)
            else:
                others(message, category, *place, **details)

        warnings.showwarning = show
        os.environ[TOLD_BY] = str(os.getpid())
        try:
            yield
        finally:
            del os.environ[TOLD_BY]


@contextmanager
def _debugging() -> Iterator[None]:
    """Print debug messages: the tracebacks of failed cases and runs."""
    log, handler = logging.getLogger("actbench"), logging.StreamHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _message(error: ActbenchError | OSError) -> str:
    if isinstance(error, ActbenchError):
        return str(error)
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename is not None else "")


class Tolerant:
    """A stream that remembers its first write error and drops all later text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the buffer, or drop it."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        """Discard the buffer, which Python would try to write again at exit."""
        self.error = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(io.UnsupportedOperation, ValueError):  # a stream without a file
            os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def tolerant() -> Iterator[Tolerant]:
    """Replace standard output and error by tolerant streams, and yield the one for output."""
    streams = sys.stdout, sys.stderr
    with ExitStack() as opened:
        # A stream is None if the parent process closed it.
        written = [one or opened.enter_context(open(os.devnull, "w")) for one in streams]
        for one in written:
            opened.enter_context(_replacing(one))
        out, err = map(Tolerant, written)
        sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = streams


@contextmanager
def _replacing(stream: TextIO) -> Iterator[None]:
    """Let a stream write ``?`` for characters that its encoding lacks."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        if not stream.closed:
            stream.reconfigure(errors=before)


@contextmanager
def explained_exits() -> Iterator[None]:
    """While a command runs, make ``os._exit`` name its caller and exit with status 2.

    A model's file, a loss or a callback may call it, and the command would end silently with status 0. Forked
    processes keep the original ``os._exit``.
    """
    own, process = os._exit, os.getpid()

    def leave(status: int) -> Any:
        if os.getpid() != process:
            own(status)
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the stream may be closed
                stream.flush()
        with suppress(Exception):
            print(f"actbench: {place} called os._exit({status}): the command ended there", file=sys.stderr, flush=True)
        own(2)

    setattr(os, "_exit", leave)  # noqa: B010  (type checkers refuse a plain assignment)
    try:
        yield
    finally:
        setattr(os, "_exit", own)  # noqa: B010
