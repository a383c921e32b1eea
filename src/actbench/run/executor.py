"""What starts cases in processes: all that the loop of a sweep knows of them.

Processes of this machine are :mod:`actbench.run.local`. Others are plug-ins, which are handed in as a
value: :class:`Machines`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from actbench import plugins
from actbench.errors import MeasurementError
from actbench.model.measured import Outcome
from actbench.model.meters import MeterName
from actbench.model.records import Case
from actbench.model.spec import parse_spec
from actbench.run.progress import Progress

BENCH = "actbench.measuring.bench"
_TIMELINES_BENCH = "actbench.measuring.timelines"
COMPILER: Final = "torch._dynamo"
"""Module that the first optimizer imports, in a second."""

PRELOAD = (
    COMPILER,
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
    "actbench.workload.huggingface",
    "actbench.workload.torchvision",
)
"""Modules that take seconds to import and that most models need.

They are imported before any memory is limited: some of them wait for ever where they meet a limit.
"""


def bench_of(*, timelines: bool) -> str:
    """Return the module that measures models, with or without the memory over the step."""
    return _TIMELINES_BENCH if timelines else BENCH


Cases = tuple[Case, ...]
"""A simulated case, or all cases that are timed against each other, the exact model first."""

Told = tuple[Case, Outcome, Mapping[str, Any]]
"""A case, its outcome, and the provenance fields of its record: machine, versions, command."""


@dataclass(frozen=True)
class Work:
    """The settings that all cases of a plan share.

    Attributes:
        progress: Receives what happens, from several threads.
        command: What the user can type to have the same, for the records.
        cases: Those that are known now, whose files an executor may have to send.
        jobs: How many simulated cases run at a time on one machine.
        timeout_seconds: Time that one case, and one trial of its largest batch, may work; None is without end.
        bench: Module that measures a case; see :class:`actbench.run.worker.Bench`.
        preload: Modules that most cases need, imported once.
        after_first: Those that the first case does without: they are imported while it works.
        printed: The folder for what unchanged scripts print; None to keep only the last of it, for messages.
        done: Whether a case has a record.
        measured: The measurement of a case whose largest batch alone is still to be found.
        needed: How many processes train together in a case.
    """

    progress: Progress
    command: str
    cases: Sequence[Case] = ()
    jobs: int = 1
    timeout_seconds: float | None = None
    bench: str = BENCH
    preload: Sequence[str] = PRELOAD
    after_first: Sequence[str] = ()
    printed: str | None = None
    done: Callable[[Case], bool] = lambda case: False
    measured: Callable[[Case], Outcome | None] = lambda case: None
    needed: Callable[[Case], int] = lambda case: 1

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules to import once before processes are forked: ``preload``, and those of the schemes of the cases.

        Scripts import what they need in their own order.
        """
        names = {part.name for case in self.cases if case.script is None for part in parse_spec(case.scheme)}
        return (*self.preload, *modules_of_schemes(names))


def modules_of_schemes(names: Iterable[str]) -> list[str]:
    """Return the modules that define the schemes of these names."""
    known = plugins.installed("schemes")
    return sorted({known[name].entry.module for name in names if name in known})


@dataclass(frozen=True)
class Place:
    """Where one simulated case, or one timing group, is measured at a time.

    Attributes:
        name: Of the device in ``CUDA_VISIBLE_DEVICES``, or of a node; None where the executor chooses.
        number: Distinguishes places of one name.
    """

    name: str | None = None
    number: int = 0


class PlaceLostError(MeasurementError):
    """Raised for a place that was there when an executor was asked for places, and is no longer."""


@dataclass(eq=False)
class Handle:
    """Cases at work.

    Attributes:
        future: Done when all cases have ended and were told, or with the error that ended the work.
        stop: Kills their processes, and does not wait for that; the future then fails, in a moment.
    """

    future: Future[None]
    stop: Callable[[], object]

    def result(self, timeout: float | None = None) -> None:
        """Wait until all cases have ended.

        Raises:
            TimeoutError: They have not, after ``timeout`` seconds.
            MeasurementError: They cannot be measured at all.
        """
        self.future.result(timeout)


class Executor(Protocol):
    """Starts cases in processes."""

    def places(self, meter: MeterName) -> Sequence[Place]:
        """Return where cases of a meter are measured side by side; there may be others a few seconds later.

        Raises:
            UsageError: There is none.
        """

    def submit(self, cases: Cases, on: Place, tell: Callable[[Told], object]) -> Handle:
        """Begin to measure cases on a free place, and return at once.

        ``tell`` is called, by any thread, as soon as a case ends, and before the search for its largest batch, too. A
        case that runs out of memory, takes too long, raises or dies ends with a :class:`Failure`.

        Raises:
            PlaceLostError: The place is gone; :meth:`places` no longer names it.
        """


class Machines(Protocol):
    """The machines of an executor: this machine, or those that a plug-in provides."""

    @property
    def elsewhere(self) -> bool:
        """Whether other machines measure, whose devices are unknown here, and whose rows all count."""

    def check(self, cases: Sequence[Case], needed: Callable[[Case], int]) -> None:
        """Raise a UsageError where they cannot be of use for these cases."""

    def start(self, work: Work) -> AbstractContextManager[Executor]:
        """Hold an executor for some work; no process of a case is left behind it.

        Raises:
            MeasurementError: The processes cannot be started at all.
            UsageError: The machines cannot be reached.
        """
