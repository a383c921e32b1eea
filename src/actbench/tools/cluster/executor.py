"""The executor of a Ray cluster: a task for what belongs together, which Ray places and tries again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

from actbench.errors import MeasurementError, first_line
from actbench.machine import provenance
from actbench.model.meters import MeterName
from actbench.model.records import Case, Failure
from actbench.run.executor import Cases, Handle, Place, PlaceLostError, Told, Work
from actbench.run.timinggroup import exact_of
from actbench.tools.cluster import node
from actbench.tools.cluster.cluster import Amounts, Nodes, connected

_OPTIONS: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_PARTS_OF_NODES: Final = ("simulated", "cuda")
"""The meters whose cases may share a node. It is unknown what disturbs the meter of another package."""

_RETRIES: Final = 1
_ENDING_SECONDS: Final = 20.0


@dataclass(frozen=True)
class Cluster:
    """An existing Ray cluster and what a case takes of it.

    Attributes:
        address: ``auto``, ``ray://HOST:PORT`` or ``HOST:PORT``.
        gpus: GPUs of a case that runs on one; a fraction shares a GPU.
        resources: Further resources of every case, by Ray's names.
    """

    address: str
    gpus: float = 1.0
    resources: Amounts = field(default_factory=dict)
    elsewhere: bool = True
    extras: ClassVar[Mapping[str, str]] = {"cluster": "nodes of a Ray cluster, by --cluster"}

    def check(self, cases: Sequence[Case], needed: Callable[[Case], int]) -> None:
        """Refuse nothing: what nodes have is seen when they are asked."""

    @contextmanager
    def start(self, work: Work) -> Iterator[RayExecutor]:
        """Hold a connection and give its executor; a UsageError if Ray or the cluster is missing."""
        with connected(self.address) as ray:
            executor = RayExecutor(ray, self, work)
            try:
                yield executor
            finally:
                executor.close()


class RayExecutor:
    """Measures cases on the nodes of the cluster that ``ray`` is connected to, each in a process of its own there.

    A simulated case is a task of one core. Cases that are timed against each other are one task, which gets a GPU or
    all cores of a node. A task whose worker or node is lost, or in which a process ended without an answer, is tried
    once more, where Ray chooses.
    """

    def __init__(self, ray: Any, cluster: Cluster, work: Work) -> None:
        self._ray, self._cluster, self._work = ray, cluster, work
        self._function, self._nodes = ray.remote(node.measure), Nodes(ray)
        self._files: dict[str, str] = {}
        self._shared: Any = None
        self._send(work.cases)
        self._origins: dict[Any, Mapping[str, Any]] = {}
        self._at_work: dict[Any, Future[None]] = {}
        self._stopped: set[Any] = set()

    def close(self) -> None:
        """Stop what is at work, and wait until its processes are gone: Ray's workers end with the connection."""
        tasks = list(self._at_work)
        for task in tasks:
            self._stop(task)
        if tasks:
            _, left = self._ray.wait(tasks, num_returns=len(tasks), timeout=_ENDING_SECONDS)
            for task in left:
                self._ray.cancel(task, force=True)

    def places(self, meter: MeterName) -> Sequence[Place]:
        """Return a place for each task that fits, or for each node that a case has to itself.

        Raises:
            UsageError: No node has what a case asks for.
        """
        able = self._nodes.able(f"a case of --meter {meter}", self._amounts(meter))
        if meter not in _PARTS_OF_NODES:
            return [Place(each.id) for each in sorted(able, key=lambda each: -each.cores)]
        fit = sum(each.fit(self._amounts(meter)) for each in able)
        return [Place(number=number) for number in range(fit)]

    def submit(self, cases: Cases, on: Place, tell: Callable[[Told], object]) -> Handle:
        """Hand a task over to Ray; see :class:`~actbench.run.executor.Executor`.

        Raises:
            PlaceLostError: The node is gone.
            UsageError: A file that a case names cannot travel.
        """
        options = {"max_retries": _RETRIES, "retry_exceptions": [node.CrashedError], **self._options(cases[0], on)}
        self._send(cases)
        for case in cases:
            self._work.progress.started(case)
        exact = exact_of(cases[0])
        request = node.Request(
            cases=cases,
            known_exact=exact not in cases and self._work.done(exact),
            timeout_seconds=self._work.timeout_seconds,
            bench=self._work.bench,
            preload=(*self._work.modules, *self._work.after_first),
        )
        task = self._function.options(**options).remote(request.model_dump_json(), self._shared)
        ended: Future[None] = Future()
        self._at_work[task] = ended
        task.future().add_done_callback(partial(self._end, cases, tell, task))
        return Handle(ended, partial(self._stop, task))

    def _stop(self, task: Any) -> None:
        """Interrupt a task, once: by force it would leave behind what its cases started."""
        if task not in self._stopped:
            self._stopped.add(task)
            self._ray.cancel(task)

    def _send(self, cases: Iterable[Case]) -> None:
        """Put what tasks share into Ray's store, once for all whose files are there."""
        files = self._files | node.files_of(cases)
        if self._shared is None or files != self._files:
            self._files, self._shared = files, self._ray.put(node.shared_of(files))

    def _amounts(self, meter: MeterName) -> Amounts:
        gpus = {"GPU": self._cluster.gpus} if meter == "cuda" else {}
        return {"CPU": 1.0, **gpus, **self._cluster.resources}

    def _options(self, case: Case, on: Place) -> dict[str, Any]:
        amounts = self._amounts(case.meter)
        if on.name is None:
            return _asking(amounts)
        alive = self._nodes.alive
        cores = next((each.cores for each in alive if each.id == on.name), None)
        if cores is None:  # the cluster was asked again since the place was given
            raise PlaceLostError(f"--cluster: the node {on.name} is gone")
        # Should the node go, Ray takes another, but one of fewer cores would leave the task waiting for ever.
        soft = any(each.id != on.name and each.cores >= cores for each in alive)
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        return {**_asking({**amounts, "CPU": cores}), "scheduling_strategy": affinity(on.name, soft=soft)}

    def _end(self, cases: Cases, tell: Callable[[Told], object], task: Any, replied: Future[str]) -> None:
        ended = self._at_work.pop(task)
        try:
            for told in self._outcomes(cases, replied):
                tell(told)
        except BaseException as error:  # passed on to the thread that waits
            ended.set_exception(error)
        else:
            ended.set_result(None)

    def _outcomes(self, cases: Cases, replied: Future[str]) -> Iterator[Told]:
        """Yield what came of a task; a MeasurementError if a node has another actbench."""
        errors = self._ray.exceptions
        try:
            text = replied.result()
        except errors.RayTaskError as error:
            if not isinstance(error.cause, node.CrashedError):
                raise MeasurementError(_explained(error.cause or error)) from None
            text = str(error.cause)
        except errors.RayError as error:
            self._nodes.look_again()
            why = f"the worker or node of the case was lost, twice: {first_line(error)}"
            for case in cases:
                yield case, Failure(reason="crash", message=why), self._origin(None)
            return
        reply = node.CasesReply.model_validate_json(text)
        for case, outcome in reply.outcomes:
            yield case, outcome, self._origin(reply)

    def _origin(self, reply: node.CasesReply | None) -> Mapping[str, Any]:
        """Return the provenance of records, one for all of a node; this machine's where a node was lost."""
        key = None if reply is None else (reply.machine, reply.versions)
        if key not in self._origins:
            said = provenance("") if reply is None else {"machine": reply.machine, "versions": reply.versions}
            self._origins[key] = {**said, "command": self._work.command}
        return self._origins[key]


def _asking(amounts: Amounts) -> dict[str, Any]:
    """Return amounts as options of a task: Ray has some of its own, and a mapping for the others."""
    own = {name: amounts[key] for key, name in _OPTIONS.items() if key in amounts}
    return {**own, "resources": {name: amount for name, amount in amounts.items() if name not in _OPTIONS}}


def _explained(cause: BaseException) -> str:
    if isinstance(cause, MeasurementError):
        return f"--cluster: {cause}"
    if isinstance(cause, ModuleNotFoundError) or "No module named" in str(cause):
        return f"--cluster: a node has no actbench that can be imported; install it on all nodes ({first_line(cause)})"
    return f"--cluster: a node failed: {type(cause).__name__}: {first_line(cause)}"
