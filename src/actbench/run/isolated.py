"""Measures each case in its own process; if that process dies or hangs, the case has failed."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import TracebackType
from typing import Protocol, Self

from actbench.model.live import LiveMemory
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.run.member import LocalMember, Member, Question, Report
from actbench.run.processes import ForkServer, NoAnswerError, deadline_after, left_until
from actbench.run.replies import AnyReply, Lost, Said, Seconds, Tried
from actbench.run.worker import CaseRequest
from actbench.units import format_seconds

LOG = logging.getLogger(__name__)
"""Tells, for ``--debug``, what the processes of failed cases wrote: their tracebacks."""

_GRACE_SECONDS = 10.0
"""How long the rank that others lost may take to say why it ended."""


class CaseSession:
    """``actbench.measuring.bench.Session`` in other processes, one of each rank; errors come back as failures.

    If one of several processes fails, the case fails and the others are killed. Leaving the context by an error kills
    the processes; otherwise they may end.

    Args:
        members: The processes, by rank.
        requests: What each is to measure.
        timeout_seconds: How long they may work in all, None for no limit; waiting for their turn is not work.

    Attributes:
        died: Whether a process ended without an answer.
        tried: Told of each trial of a simulated search for the largest batch.
        said: Told of simulated steps that take long.
        reported: Told of the memory of the case while it runs, if its request asks for that.
    """

    def __init__(
        self, members: Sequence[Member], requests: Sequence[CaseRequest], timeout_seconds: float | None
    ) -> None:
        self._members = members
        self._requests = requests
        self._timeout_seconds = timeout_seconds
        self._worked_seconds = 0.0
        self.died = False
        self.tried: Callable[[int, bool], object] = lambda batch_size, fits: None
        self.note: Callable[[str], object] = lambda text: None
        self.reported: Callable[[LiveMemory], object] = lambda report: None

    def memory(self) -> Measurement | Failure:
        """Build the case and read everything but time."""
        replies = self._ask([Question.memory(request) for request in self._requests])
        if isinstance(replies, Failure):
            return replies
        return merged([reply for reply in replies if isinstance(reply, Measurement)])

    def time(self, steps: int) -> tuple[float, ...] | Failure | None:
        """Run one round of timed steps; None where the meter has no clock."""
        replies = self._ask([Question.time(steps)] * len(self._members))
        if isinstance(replies, Failure):
            return replies
        return slowest([reply.steps for reply in replies if isinstance(reply, Seconds)])

    @contextmanager
    def _working(self) -> Iterator[float | None]:
        """Count the seconds of the block as work, and give those that it may take."""
        started = time.monotonic()
        try:
            yield None if self._timeout_seconds is None else max(0.0, self._timeout_seconds - self._worked_seconds)
        finally:
            self._worked_seconds += time.monotonic() - started

    def _ask(self, questions: Sequence[Question]) -> list[AnyReply] | Failure:
        """Ask each process its question, and return their answers by rank, or the failure of one.

        Raises:
            MeasurementError: Who started a process is gone, and the process with it.
        """
        try:
            with self._working() as left:
                deadline = deadline_after(left)
                for member, question in zip(self._members, questions, strict=True):
                    member.ask(question, deadline)
                return self._answers(deadline)
        except NoAnswerError:
            self._kill()
            limit = format_seconds(self._timeout_seconds or 0)
            return Failure(
                reason="timeout",
                message=f"the case worked for longer than --timeout {limit} and was stopped while "
                f"{questions[0].doing}; allow more",
            )

    def _answers(self, deadline: float | None) -> list[AnyReply] | Failure:
        found: dict[int, AnyReply] = {}
        lost: Failure | None = None
        grace: float | None = None
        waiting = dict(enumerate(self._members))
        while waiting:
            sources = [source for member in waiting.values() for source in member.sources]
            ready = wait(sources, left_until(grace or deadline))
            if not ready:
                if lost is not None:
                    break
                raise NoAnswerError
            for rank, member in list(waiting.items()):
                report = member.read(deadline) if any(source in ready for source in member.sources) else None
                if report is None:
                    continue
                if isinstance(report.reply, Tried | Said | LiveMemory):
                    self._pass_on(report.reply)
                    continue
                del waiting[rank]
                self._note(rank, report)
                if isinstance(report.reply, Failure):
                    return self._failed(rank, report.reply)
                if isinstance(report.reply, Lost):
                    why = f"rank {rank} of {len(self._members)} lost the others: {report.reply.message}"
                    lost = lost or Failure(reason="crash", message=why)
                    grace = grace or deadline_after(_GRACE_SECONDS)
                found[rank] = report.reply
        if lost is not None:
            self._kill()
            return lost
        return [found[rank] for rank in sorted(found)]

    def _pass_on(self, news: Tried | Said | LiveMemory) -> None:
        if isinstance(news, Tried):
            self.tried(news.batch_size, news.fits)
        elif isinstance(news, LiveMemory):
            self.reported(news)
        else:
            self.note(news.text)

    def _note(self, rank: int, report: Report) -> None:
        self.died |= report.died
        if report.written:
            LOG.debug("%s, rank %d: in its process:\n%s", self._requests[rank].case.name, rank, report.written)

    def _failed(self, rank: int, failure: Failure) -> Failure:
        """Return the failure of one process as that of the case; the others would wait for it."""
        if len(self._members) == 1:
            return failure
        self._kill()
        return failure.model_copy(update={"message": f"rank {rank} of {len(self._members)}: {failure.message}"})

    def interrupt(self) -> None:
        """Kill the process here, from another thread than the one that asks it: the case fails, the others with it."""
        for member in self._members:
            if isinstance(member, LocalMember):
                member.interrupt()

    def close(self) -> None:
        """Let the processes end."""
        for member in self._members:
            member.close()

    def _kill(self) -> None:
        for member in self._members:
            member.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._kill()


class Open(Protocol):
    """Starts what measures a case."""

    def __call__(self, case: Case, *, is_trial: bool = False) -> CaseSession:
        """Return the session; ``is_trial`` is as in :class:`~actbench.run.worker.CaseRequest`."""


class IsolatedSession(CaseSession):
    """A case of one process, on this machine.

    ``is_trial``, ``gpu``, ``printed`` and ``is_live`` are as in :class:`~actbench.run.worker.CaseRequest`.
    """

    def __init__(
        self,
        server: ForkServer,
        case: Case,
        timeout_seconds: float | None,
        *,
        is_trial: bool = False,
        gpu: str | None = None,
        printed: str | None = None,
        is_live: bool = False,
    ) -> None:
        request = CaseRequest(
            case=case, is_trial=is_trial, seconds=timeout_seconds, gpu=gpu, printed=printed, is_live=is_live
        )
        super().__init__([LocalMember(server)], [request], timeout_seconds)


def merged(found: Sequence[Measurement]) -> Measurement:
    """Return the measurement of the rank with the largest peak, with what all ranks report of themselves."""
    largest = max(found, key=lambda one: one.peak_bytes)
    if len(found) == 1:
        return largest
    losses = [one.loss for one in found if one.loss is not None]
    own = {
        "rank_peak_bytes": tuple(one.peak_bytes for one in found),
        "reserved_bytes": _most([one.reserved_bytes for one in found]),
        "process_bytes": _most([one.process_bytes for one in found]),
        "over_limit_bytes": _most([one.over_limit_bytes for one in found]),
        "loss": statistics.fmean(losses) if losses else None,
        "warnings": tuple(dict.fromkeys(warning for one in found for warning in one.warnings)),
    }
    return largest.model_copy(update=own)


def slowest(found: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    """Return the time of each step on the slowest rank; None where a meter has no clock."""
    timed = [steps for steps in found if steps is not None]
    return tuple(map(max, zip(*timed, strict=True))) if len(timed) == len(found) else None


def _most(found: Sequence[int | None]) -> int | None:
    return max((each for each in found if each is not None), default=None)
