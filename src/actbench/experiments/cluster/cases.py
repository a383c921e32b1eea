"""A sweep's cases as tasks of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from actbench.experiments.cluster import node
from actbench.experiments.cluster.cluster import Cluster, Needs
from actbench.experiments.cluster.node import Origins, shared_of
from actbench.experiments.cluster.tasks import LostTask, RayTasks
from actbench.experiments.experiment import RecordSink, Summary, keep, pending
from actbench.experiments.recipes.sections import Planned
from actbench.experiments.runner.progress import Progress
from actbench.experiments.runner.runner import BENCH, PRELOAD
from actbench.experiments.runner.timinggroup import exact_of, timing_groups
from actbench.results.measured import MeasuredRecord, Outcome
from actbench.results.records import Case, Failure

Cases = tuple[Case, ...]
_TIMED: Final = ("cuda", "cpu")


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
    bench: str = BENCH,
    preload: Sequence[str] = PRELOAD,
) -> Summary:
    """Measure the cases of a plan that are not done, as :func:`actbench.experiments.runner.runner.run` does here.

    Raises:
        MeasurementError: A node has another actbench, or none.
        UsageError: The cluster cannot be reached, or no node has what a case asks for.
        StoreError: A record cannot be stored.
    """
    progress = progress or Progress()
    todo = pending(plan, store, progress, force=force, retry_failed=retry_failed)
    if not todo:
        return Summary(skipped=len({entry.case for entry in plan}))
    work = CaseWork(progress, timeout_seconds, store.done, bench, tuple(preload))
    with connected(cluster, command, work) as nodes, closing(nodes.outcomes(todo)) as outcomes:
        return keep(outcomes, MeasuredRecord, plan, store, progress, recipe=recipe, origin=nodes.origins.pop)


@dataclass(frozen=True)
class CaseWork:
    """Measuring cases that belong together on a node.

    Fields are as of :func:`run`, and ``done`` as of stores. ``is_ahead`` says whether simulated cases are handed over
    before the last ones end.
    """

    progress: Progress
    timeout_seconds: float | None = None
    done: Callable[[Case], bool] = lambda case: False
    bench: str = BENCH
    preload: tuple[str, ...] = PRELOAD
    is_ahead: bool = True
    function: Callable[[str, str], str] = field(default=node.measure)

    def request(self, item: Cases) -> str:
        """Return a :class:`~actbench.experiments.cluster.node.Request` in JSON."""
        exact = exact_of(item[0])
        request = node.Request(
            cases=item,
            known_exact=exact not in item and self.done(exact),
            timeout_seconds=self.timeout_seconds,
            bench=self.bench,
            preload=self.preload,
        )
        return request.model_dump_json()

    def reply(self, text: str) -> node.CasesReply:
        """Read what a node returned."""
        return node.CasesReply.model_validate_json(text)

    def crashed(self, reply: node.CasesReply) -> bool:
        """Whether a case ended its process."""
        return any(isinstance(outcome, Failure) and outcome.reason == "crash" for _, outcome in reply.outcomes)

    def started(self, item: Cases) -> None:
        """Tell the progress."""
        for case in item:
            self.progress.started(case)


@contextmanager
def connected(cluster: Cluster, command: str, work: CaseWork) -> Iterator[ClusterCases]:
    """Hold what measures cases on the nodes of a cluster; a UsageError if the cluster cannot be reached."""
    with cluster.connected() as ray:
        yield ClusterCases(ray, cluster, work, Origins(command))


@dataclass
class ClusterCases:
    """Measures cases on the nodes of the cluster that ``ray`` is connected to.

    Attributes:
        origins: Machine, versions and command of the records of cases that ended.
    """

    ray: Any
    cluster: Cluster
    work: CaseWork
    origins: Origins[Case]
    _made: tuple[str, RayTasks[Cases, node.CasesReply]] | None = None

    def outcomes(
        self, cases: Sequence[Case], may_begin: Callable[[], bool] = lambda: True
    ) -> Generator[tuple[Case, Outcome], None, None]:
        """Yield each case with its outcome as soon as its task ends.

        A simulated case is a task of one core. Then come the cases that are timed against each other, one task for all
        of them, of a GPU or of all cores of a node. Once ``may_begin()`` is false no more begin.

        Raises:
            MeasurementError: A node has another actbench, or none.
            UsageError: No node has what a case asks for.
        """
        tasks = self._tasks(cases)
        simulated = [(case,) for case in cases if case.meter == "simulated"]
        timed = [tuple(group) for group in timing_groups([case for case in cases if case.meter != "simulated"])]
        by_meter = {"simulated": simulated} | {
            meter: [group for group in timed if group[0].meter == meter] for meter in _TIMED
        }
        for meter, groups in by_meter.items():  # what is timed has no simulated case beside it
            if groups:
                with closing(tasks.replies(groups, self._needs(meter), may_begin)) as replies:
                    for item, reply in replies:
                        yield from self._outcomes(item, reply)

    def _tasks(self, cases: Sequence[Case]) -> RayTasks[Cases, node.CasesReply]:
        shared = shared_of(cases)
        if self._made is None or self._made[0] != shared:
            self._made = shared, RayTasks(self.ray, self.work, shared)
        return self._made[1]

    def _needs(self, meter: str) -> Needs:
        gpus: Mapping[str, float] = {"GPU": self.cluster.gpus} if meter == "cuda" else {}
        return Needs(
            f"a case of --meter {meter}",
            {"CPU": 1.0, **gpus, **self.cluster.resources},
            whole_node=meter == "cpu",
            is_short=meter == "simulated" and self.work.is_ahead,
        )

    def _outcomes(self, item: Cases, reply: node.CasesReply | LostTask) -> Sequence[tuple[Case, Outcome]]:
        if isinstance(reply, LostTask):
            why = f"the worker or node of the case was lost, twice: {reply.why}"
            self.origins.note(item, None)
            return [(case, Failure(reason="crash", message=why)) for case in item]
        self.origins.note(item, reply)
        return reply.outcomes
