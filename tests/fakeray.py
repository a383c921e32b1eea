"""Stands in for Ray in the tests of clusters: tasks are done when they are asked about, in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from actbench.experiments.cluster.node import Reply
from actbench.results.machine import provenance

Answer = Callable[[str, int], str]
"""What a node answers to a request, the number of the task given."""

IDS = {"first": "a" * 56, "second": "b" * 56}
HAS = {"GPU": 1.0, "a100": 1.0, "memory": 64e9, "node:10.0.0.1": 1.0}


class RayError(Exception):
    """As of Ray: a worker or node was lost."""


class RayTaskError(RayError):
    """As of Ray: the task raised something."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def where(host: str = "first") -> dict[str, Any]:
    """Return the fields of a reply that say where a task was."""
    made = _here()
    return dict(Reply(machine=made["machine"], versions=made["versions"], node=IDS[host]))


@functools.cache
def _here() -> dict[str, Any]:
    """Ask what this machine is once: the answer takes processes."""
    return dict(provenance(""))


class FakeRay:
    """Answers requests, and remembers what was asked for.

    Attributes:
        asked: Request, shared text and options of each task.
        calls: How often each function of Ray's was called that asks the cluster something.
        cores: Of each node.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.cancelled: list[Any] = []
        self.calls = {"nodes": 0, "remote": 0, "put": 0}
        self.cores = {"first": 4.0, "second": 8.0}
        self.has = HAS
        self.most_flying = 0
        self.ended_at_a_time = 1

    def remote(self, function: object) -> Any:
        self.calls["remote"] += 1
        self.function = function
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *texts: self._run(*texts, options))
        )

    def put(self, text: str) -> str:
        self.calls["put"] += 1
        return text

    def _run(self, request: str, shared: str, options: dict[str, Any]) -> int:
        options = dict(options)
        assert options.pop("max_retries") == 0  # retries are counted here, so that they go elsewhere
        self.asked.append((request, shared, options))
        return len(self.asked) - 1

    def wait(self, tasks: list[int], num_returns: int, timeout: float | None = None) -> tuple[list[int], list[int]]:
        self.most_flying = max(self.most_flying, len(tasks))
        ended = min(num_returns, self.ended_at_a_time)
        return tasks[:ended], tasks[ended:]

    def get(self, task: int) -> str:
        return self._answer(self.asked[task][0], task)

    def cancel(self, task: int, force: bool) -> None:
        self.cancelled.append(task)

    def nodes(self) -> list[dict[str, Any]]:
        self.calls["nodes"] += 1
        return [
            {
                "Alive": True,
                "NodeManagerHostname": name,
                "NodeID": IDS[name],
                "Resources": {**self.has, "CPU": self.cores[name]},
            }
            for name in IDS
        ]
