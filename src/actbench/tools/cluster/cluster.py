"""An existing Ray cluster: the connection, and which of its nodes have what a case asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from actbench.errors import UsageError, first_line
from actbench.paths import away_from_here
from actbench.tools.cluster.answering import check_answers

Amounts = Mapping[str, float]
"""How much of each resource, by Ray's names: ``CPU``, ``GPU``, ``memory`` and others."""

_LOOK_SECONDS: Final = 5.0
"""Seconds after which the cluster is asked again for its nodes, which may come and go."""


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Hold a connection and give the module ``ray``; a UsageError if Ray or the cluster is missing, or silent."""
    try:
        import ray
    except ImportError:
        raise UsageError("--cluster needs Ray: pip install 'actbench[cluster]'") from None
    check_answers(address)
    settings: Any = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        with away_from_here():  # Ray puts the current folder first on the workers' import path
            ray.init(address=address, **settings)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        why = first_line(error)
        raise UsageError(
            f"--cluster {address}: no Ray cluster is reached ({why}); 'ray start --head' starts one"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Node:
    """A node that is alive."""

    id: str
    host: str
    resources: Amounts

    @property
    def cores(self) -> float:
        """Its cores, as Ray counts them."""
        return self.resources.get("CPU", 0.0)

    def fit(self, amounts: Amounts) -> int:
        """Return how many tasks with these amounts the node can run at a time."""
        return int(min(self.resources.get(name, 0.0) / amount for name, amount in amounts.items()))

    def __str__(self) -> str:
        shown = {name: amount for name, amount in self.resources.items() if not name.startswith("node:")}
        return f"{self.host} {', '.join(f'{name}={amount:g}' for name, amount in sorted(shown.items()))}"


@dataclass
class Nodes:
    """The nodes of the cluster that ``ray`` is connected to, read again every few seconds and after a loss."""

    ray: Any
    _alive: list[Node] = field(default_factory=list)
    _looked: float | None = None

    def look_again(self) -> None:
        """Read the nodes from the cluster when they are next needed."""
        self._looked = None

    @property
    def alive(self) -> list[Node]:
        """The nodes that are alive."""
        now = time.monotonic()
        if self._looked is None or now - self._looked > _LOOK_SECONDS:
            entries = [entry for entry in self.ray.nodes() if entry["Alive"]]
            self._alive = [Node(entry["NodeID"], entry["NodeManagerHostname"], entry["Resources"]) for entry in entries]
            self._looked = now
        return self._alive

    def able(self, what: str, amounts: Amounts) -> list[Node]:
        """Return the nodes that have the amounts of a task; a UsageError, which names ``what``, if there is none."""
        able = [node for node in self.alive if node.fit(amounts)]
        if not able:
            asked = ", ".join(f"{name}={amount:g}" for name, amount in amounts.items())
            found = "; ".join(map(str, self.alive)) or "none is alive"
            raise UsageError(f"--cluster: {what} needs {asked}, and no node has that; nodes: {found}")
        return able
