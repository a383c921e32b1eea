"""Work as tasks of a Ray cluster: as many as run at a time are handed over, and what is lost is tried once more."""

from __future__ import annotations

import importlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from actbench.errors import MeasurementError, first_line
from actbench.experiments.cluster.cluster import LOOK_SECONDS, Needs, Node, Nodes
from actbench.experiments.cluster.node import Reply

ItemT = TypeVar("ItemT")
ReplyT = TypeVar("ReplyT", bound=Reply)
AnyItem = TypeVar("AnyItem", contravariant=True)

_RETRIES: Final = 1
_OPTIONS: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_AFFINITY: Final = "ray.util.scheduling_strategies"


class Work(Protocol[AnyItem, ReplyT]):
    """What is done with an item, on a node and here."""

    @property
    def function(self) -> Callable[[str, str], str]:
        """From a request and what all requests share to a reply, all in JSON; it runs on a node."""

    def request(self, item: AnyItem) -> str:
        """Return the request of an item."""

    def reply(self, text: str) -> ReplyT:
        """Read a reply."""

    def crashed(self, reply: ReplyT) -> bool:
        """Whether something ended its process, so that another node may do better."""

    def started(self, item: AnyItem) -> None:
        """Tell that work on an item starts."""


@dataclass(frozen=True)
class LostTask:
    """A worker or node was lost with an item, as often as it was tried; ``why`` is what Ray says of it."""

    why: str


@dataclass(eq=False)
class _Task(Generic[ItemT]):
    """An item, how often it was tried, the nodes it failed on, and the one that it is bound to, if any."""

    item: ItemT
    tries: int = 0
    failed_on: set[str] = field(default_factory=set)
    node: str | None = None


class RayTasks(Generic[ItemT, ReplyT]):
    """Does work on the nodes of the cluster that ``ray`` is connected to.

    ``shared`` is what the function gets beside each request; it goes to each node once.
    """

    def __init__(self, ray: Any, work: Work[ItemT, ReplyT], shared: str) -> None:
        self._ray, self._work = ray, work
        self._function, self._shared = ray.remote(work.function), ray.put(shared)
        self._nodes = Nodes(ray)
        self._plain: tuple[Needs, Any] | None = None

    def replies(
        self, items: Iterable[ItemT], needs: Needs, may_begin: Callable[[], bool] = lambda: True
    ) -> Generator[tuple[ItemT, ReplyT | LostTask], None, None]:
        """Yield each item with its reply as soon as its task ends.

        A task whose worker or node is lost, or whose reply says that a process ended, is tried once more, on another
        node where there is one and it is known where the task was: Ray does not say that of a lost worker.
        Items are taken as they can be handed over; none begins once ``may_begin()`` is false.

        Raises:
            MeasurementError: A node has another actbench, or none.
            UsageError: No node has what is needed.
        """
        waiting = _Waiting(items)
        flying: dict[Any, _Task[ItemT]] = {}
        early: deque[_Task[ItemT]] = deque()  # handed over before there is room for them
        try:
            while True:
                slots = self._nodes.slots(needs)
                most = 2 * slots if needs.is_short else slots
                while len(flying) < most and may_begin() and (task := waiting.next()) is not None:
                    flying[self._submit(task, needs, flying.values())] = task
                    if not task.tries:
                        early.append(task)
                while early and len(flying) - len(early) < slots:
                    self._work.started(early.popleft().item)
                if not flying:
                    return
                for ref in self._ended(list(flying)):
                    task = flying.pop(ref)
                    if task in early:  # it overtook those that were handed over before
                        early.remove(task)
                        self._work.started(task.item)
                    reply = self._reply(ref, task)
                    if reply is None:
                        waiting.again(task)
                    else:
                        yield task.item, reply
        finally:
            for ref in flying:
                self._ray.cancel(ref, force=True)

    def _ended(self, refs: list[Any]) -> list[Any]:
        """Return the tasks that ended, after a while none: the cluster may have grown."""
        ended, _ = self._ray.wait(refs, num_returns=1, timeout=LOOK_SECONDS)
        if ended and len(refs) > 1:
            ended, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        return list(ended)

    def _submit(self, task: _Task[ItemT], needs: Needs, flying: Iterable[_Task[ItemT]]) -> Any:
        if needs.whole_node or task.failed_on:
            options = self._options(task, needs, Counter(each.node for each in flying))
            function = self._function.options(**options, max_retries=0)
        else:
            function = self._anywhere(needs)
        return function.remote(self._work.request(task.item), self._shared)

    def _anywhere(self, needs: Needs) -> Any:
        """Return the function with what most tasks ask for: Ray takes its time to check that."""
        if self._plain is None or self._plain[0] is not needs:
            self._plain = needs, self._function.options(**_asking(needs.amounts), max_retries=0)
        return self._plain[1]

    def _options(self, task: _Task[ItemT], needs: Needs, busy: Mapping[str | None, int]) -> dict[str, Any]:
        """Return what a task asks for that is sent to a node: to all of it, or to one on which it did not fail."""
        task.node = None
        able = self._nodes.able(needs)
        others = [node for node in able if node.id not in task.failed_on]
        if needs.whole_node:
            chosen = min(others or able, key=lambda node: (busy[node.id], -node.cores))
            task.node = chosen.id
            return self._bound({**needs.amounts, "CPU": chosen.cores}, chosen, soft=False)
        return self._bound(needs.amounts, others[0], soft=True) if others else _asking(needs.amounts)

    @staticmethod
    def _bound(amounts: Mapping[str, float], node: Node, *, soft: bool) -> dict[str, Any]:
        affinity = importlib.import_module(_AFFINITY).NodeAffinitySchedulingStrategy
        return {**_asking(amounts), "scheduling_strategy": affinity(node.id, soft=soft)}

    def _reply(self, ref: Any, task: _Task[ItemT]) -> ReplyT | LostTask | None:
        """Return what came of a task, or None to try it again; a MeasurementError if a node has another actbench."""
        task.tries += 1
        errors = self._ray.exceptions
        try:
            reply = self._work.reply(self._ray.get(ref))
        except errors.RayTaskError as error:
            raise MeasurementError(_explained(error)) from None
        except errors.RayError as error:
            self._nodes.look_again()
            if task.node is not None:
                task.failed_on.add(task.node)
            return None if task.tries <= _RETRIES else LostTask(first_line(error))
        if task.tries <= _RETRIES and self._work.crashed(reply):
            task.failed_on.add(reply.node)
            return None
        return reply


class _Waiting(Generic[ItemT]):
    """Items that are to be done, those first that are to be tried again."""

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._items = iter(items)
        self._again: deque[_Task[ItemT]] = deque()

    def next(self) -> _Task[ItemT] | None:
        if self._again:
            return self._again.popleft()
        return next((_Task(item) for item in self._items), None)

    def again(self, task: _Task[ItemT]) -> None:
        self._again.append(task)


def _asking(amounts: Mapping[str, float]) -> dict[str, Any]:
    """Return amounts as options of a task: Ray has some of its own, and a mapping for the others."""
    own = {name: amounts[key] for key, name in _OPTIONS.items() if key in amounts}
    return {**own, "resources": {name: amount for name, amount in amounts.items() if name not in _OPTIONS}}


def _explained(error: Any) -> str:
    cause = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
    if isinstance(cause, MeasurementError):
        return f"--cluster: {cause}"
    if isinstance(cause, ModuleNotFoundError) or "No module named" in str(error):
        return f"--cluster: a node has no actbench that can be imported; install it on all nodes ({first_line(cause)})"
    return f"--cluster: a node failed: {type(cause).__name__}: {first_line(cause)}"
