"""A sweep's cases as tasks of a Ray cluster: which resources they ask for, and what becomes of those that are lost."""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from actbench.errors import MeasurementError, UsageError
from actbench.experiments.cluster import node
from actbench.experiments.cluster.travel import files_of
from actbench.experiments.experiment import RecordSink, Summary, keep, pending
from actbench.experiments.recipes.sections import Planned
from actbench.experiments.runner.progress import Progress
from actbench.experiments.runner.timinggroup import exact_of, timing_groups
from actbench.results.machine import provenance
from actbench.results.measured import MeasuredRecord, Outcome
from actbench.results.records import Case, Failure

_RETRIES: Final = 1
_OPTIONS: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_AFFINITY: Final = "ray.util.scheduling_strategies"


@dataclass(frozen=True)
class Cluster:
    """An existing Ray cluster and what a case takes of it.

    Attributes:
        address: ``auto``, ``ray://HOST:PORT`` or ``HOST:PORT``.
        gpus: Of a case of the cuda meter, which may be a part of one.
        resources: Further resources of every case, by Ray's names.
    """

    address: str
    gpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Hold a connection.

        Yields:
            The module ``ray``.

        Raises:
            UsageError: Ray is not installed, or there is no cluster at the address.
        """
        try:
            import ray
        except ImportError:
            raise UsageError("--cluster needs Ray: pip install 'actbench[cluster]'") from None
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UsageError(
                f"--cluster {self.address}: no Ray cluster is reached ({why}); 'ray start --head' starts one"
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()


def run(
    cluster: Cluster,
    plan: Sequence[Planned[Case]],
    store: RecordSink[MeasuredRecord],
    *,
    recipe: str,
    command: str,
    timeout_seconds: float | None = None,
    force: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Measure the cases of a plan that are not done, as :func:`actbench.experiments.runner.runner.run` does here.

    Raises:
        MeasurementError: A node has another actbench, or none.
        UsageError: The cluster cannot be reached.
        StoreError: A record cannot be stored.
    """
    progress = progress or Progress()
    todo = pending(plan, store, progress, force=force, retry_failed=retry_failed)
    if not todo:
        return Summary(skipped=len({entry.case for entry in plan}))
    sweep = ClusterSweep(cluster, command, timeout_seconds, progress, store.done)
    with closing(sweep.outcomes(todo)) as outcomes:
        return keep(outcomes, MeasuredRecord, plan, store, progress, recipe=recipe, origin=sweep.origins.__getitem__)


@dataclass(eq=False)
class _Item:
    """Cases of one task, how often it was tried, and on which nodes it failed."""

    cases: tuple[Case, ...]
    tries: int = 0
    hosts: list[str] = field(default_factory=list)


class ClusterSweep:
    """Measures cases on the nodes of a cluster.

    Attributes:
        origins: Machine, versions and command of the records of cases that ended, by case.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: str,
        timeout_seconds: float | None,
        progress: Progress,
        done: Callable[[Case], bool] = lambda case: False,
    ) -> None:
        self.origins: dict[Case, Mapping[str, Any]] = {}
        self._cluster, self._command, self._done = cluster, command, done
        self._timeout_seconds, self._progress = timeout_seconds, progress

    def outcomes(self, cases: Sequence[Case]) -> Generator[tuple[Case, Outcome], None, None]:
        """Yield each case with its outcome as soon as its task ends.

        A simulated case is a task of one core. Then come the cases that are timed against each other, one task for all
        of them, of a GPU or of all cores of a node. A task whose worker or node is lost, or one of whose cases ends its
        process, is tried once more, on another node where there is one.

        Raises:
            MeasurementError: A node has another actbench, or none.
            UsageError: The cluster cannot be reached, or no node has what a case asks for.
        """
        simulated = [(case,) for case in cases if case.meter == "simulated"]
        timed = [tuple(group) for group in timing_groups([case for case in cases if case.meter != "simulated"])]
        files = files_of(cases)
        with self._cluster.connected() as ray:
            for groups in (simulated, timed):  # what is timed has no simulated case beside it
                yield from self._run(ray, deque(map(_Item, groups)), files)

    def _run(
        self, ray: Any, waiting: deque[_Item], files: dict[str, str]
    ) -> Generator[tuple[Case, Outcome], None, None]:
        flying: dict[Any, _Item] = {}
        try:
            while waiting or flying:
                cores = int(ray.cluster_resources().get("CPU", 0))
                while waiting and len(flying) < max(1, cores):
                    item = waiting.popleft()
                    flying[self._submit(ray, item, files)] = item
                (ready,), _ = ray.wait(list(flying), num_returns=1)
                item = flying.pop(ready)
                ended = self._ended(ray, ready, item)
                if ended is None:
                    waiting.appendleft(item)
                else:
                    yield from ended
        finally:
            for task in flying:
                ray.cancel(task, force=True)

    def _submit(self, ray: Any, item: _Item, files: dict[str, str]) -> Any:
        exact = exact_of(item.cases[0])
        request = node.Request(
            cases=item.cases,
            known_exact=exact not in item.cases and self._done(exact),
            timeout_seconds=self._timeout_seconds,
            files=files,
            sources=node.sources(),
            command=self._command,
        )
        if not item.tries:
            for case in item.cases:
                self._progress.started(case)
        options = self._options(ray, item)
        return ray.remote(node.measure).options(**options, max_retries=0).remote(request.model_dump_json())

    def _options(self, ray: Any, item: _Item) -> dict[str, Any]:
        """Return what a task asks for, and the node that it is sent to where that matters.

        Raises:
            UsageError: No node has it.
        """
        meter = item.cases[0].meter
        needs = {"CPU": 1.0, **({"GPU": self._cluster.gpus} if meter == "cuda" else {}), **self._cluster.resources}
        nodes = [entry for entry in ray.nodes() if entry["Alive"]]
        able = [entry for entry in nodes if all(entry["Resources"].get(name, 0) >= needs[name] for name in needs)]
        if not able:
            asked = ", ".join(f"{name}={amount:g}" for name, amount in needs.items())
            found = "; ".join(_resources(entry) for entry in nodes) or "none is alive"
            raise UsageError(f"--cluster: no node has {asked}, as a case of --meter {meter} asks for; nodes: {found}")
        others = [entry for entry in able if entry["NodeManagerHostname"] not in item.hosts]
        if meter == "cpu":  # all cores, so that nothing runs beside it
            chosen = max(others or able, key=lambda entry: entry["Resources"]["CPU"])
            needs["CPU"] = chosen["Resources"]["CPU"]
        elif item.hosts and others:
            chosen = others[0]
        else:
            return _asking(needs)
        affinity = importlib.import_module(_AFFINITY).NodeAffinitySchedulingStrategy
        return {**_asking(needs), "scheduling_strategy": affinity(chosen["NodeID"], soft=meter != "cpu")}

    def _ended(self, ray: Any, task: Any, item: _Item) -> list[tuple[Case, Outcome]] | None:
        """Return what came of a task, or None where it is to be tried again.

        Raises:
            MeasurementError: A node has another actbench, or none.
        """
        item.tries += 1
        try:
            reply = node.Reply.model_validate_json(ray.get(task))
        except ray.exceptions.RayTaskError as error:
            raise MeasurementError(_explained(error)) from None
        except ray.exceptions.RayError as error:
            if item.tries <= _RETRIES:
                return None
            why = f"the worker or node of the case was lost, twice: {_first_line(error)}"
            self.origins.update(dict.fromkeys(item.cases, provenance(self._command)))
            return [(case, Failure(reason="crash", message=why)) for case in item.cases]
        if item.tries <= _RETRIES and any(_crashed(outcome) for _, outcome in reply.outcomes):
            item.hosts.append(reply.host)
            return None
        origin = {"machine": reply.machine, "versions": reply.versions, "command": self._command}
        self.origins.update(dict.fromkeys(item.cases, origin))
        return list(reply.outcomes)


def _crashed(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.reason == "crash"


def _asking(needs: Mapping[str, float]) -> dict[str, Any]:
    """Return needs as options of a task: Ray has some of its own, and a mapping for the others."""
    own = {name: needs[key] for key, name in _OPTIONS.items() if key in needs}
    return {**own, "resources": {name: amount for name, amount in needs.items() if name not in _OPTIONS}}


def _resources(entry: Mapping[str, Any]) -> str:
    shown = {name: amount for name, amount in entry["Resources"].items() if not name.startswith("node:")}
    return f"{entry['NodeManagerHostname']} {', '.join(f'{name}={amount:g}' for name, amount in sorted(shown.items()))}"


def _explained(error: Any) -> str:
    cause = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
    if isinstance(cause, MeasurementError):
        return f"--cluster: {cause}"
    if isinstance(cause, ModuleNotFoundError) or "No module named" in str(error):
        return f"--cluster: a node has no actbench that can be imported; install it on all nodes ({_first_line(cause)})"
    return f"--cluster: a node failed: {type(cause).__name__}: {_first_line(cause)}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
