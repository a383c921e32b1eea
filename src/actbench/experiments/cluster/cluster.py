"""An existing Ray cluster: what a case or run takes of it, and which of its nodes have that."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from actbench.errors import UsageError, first_line
from actbench.paths import away_from_here


@dataclass(frozen=True)
class Cluster:
    """An existing Ray cluster and what a case takes of it.

    Attributes:
        address: ``auto``, ``ray://HOST:PORT`` or ``HOST:PORT``.
        gpus: Of what runs on a GPU, which may be a part of one.
        resources: Further resources of every case, by Ray's names.
    """

    address: str
    gpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Hold a connection and give the module ``ray``; a UsageError if Ray or the cluster is missing."""
        try:
            import ray
        except ImportError:
            raise UsageError("--cluster needs Ray: pip install 'actbench[cluster]'") from None
        settings: Any = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        try:
            with away_from_here():  # Ray puts the current folder first on the workers' import path
                ray.init(address=self.address, **settings)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            why = first_line(error)
            raise UsageError(
                f"--cluster {self.address}: no Ray cluster is reached ({why}); 'ray start --head' starts one"
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()


LOOK_SECONDS: Final = 5.0
"""After which the cluster is asked again which nodes it has: they may come and go."""


@dataclass(frozen=True)
class Needs:
    """What a task asks of a node.

    Attributes:
        what: For messages, such as "a case of --meter cpu".
        amounts: By Ray's names: ``CPU``, ``GPU``, ``memory`` and others.
        whole_node: Whether it takes all cores of a node, so that nothing runs beside it.
        is_short: Whether it takes seconds, so that the next is handed over before it ends.
    """

    what: str
    amounts: Mapping[str, float]
    whole_node: bool = False
    is_short: bool = False


@dataclass(frozen=True)
class Node:
    """A node that is alive."""

    id: str
    host: str
    resources: Mapping[str, float]

    @property
    def cores(self) -> float:
        """Its cores, as Ray counts them."""
        return self.resources.get("CPU", 0.0)

    def slots(self, needs: Needs) -> int:
        """Return how many tasks of these needs it can do at a time."""
        if any(self.resources.get(name, 0.0) < amount for name, amount in needs.amounts.items()):
            return 0
        if needs.whole_node:
            return 1
        return int(min(self.resources[name] / amount for name, amount in needs.amounts.items() if amount))

    def __str__(self) -> str:
        shown = {name: amount for name, amount in self.resources.items() if not name.startswith("node:")}
        return f"{self.host} {', '.join(f'{name}={amount:g}' for name, amount in sorted(shown.items()))}"


@dataclass
class Nodes:
    """The nodes of the cluster that ``ray`` is connected to, looked at every few seconds and after a loss."""

    ray: Any
    _alive: list[Node] = field(default_factory=list)
    _looked: float | None = None

    def look_again(self) -> None:
        """Ask the cluster at the next occasion."""
        self._looked = None

    @property
    def alive(self) -> list[Node]:
        """The nodes that are alive."""
        now = time.monotonic()
        if self._looked is None or now - self._looked > LOOK_SECONDS:
            entries = [entry for entry in self.ray.nodes() if entry["Alive"]]
            self._alive = [Node(entry["NodeID"], entry["NodeManagerHostname"], entry["Resources"]) for entry in entries]
            self._looked = now
        return self._alive

    def able(self, needs: Needs) -> list[Node]:
        """Return the nodes that have what a task asks for; a UsageError if there is none."""
        able = [node for node in self.alive if node.slots(needs)]
        if not able:
            asked = ", ".join(f"{name}={amount:g}" for name, amount in needs.amounts.items())
            found = "; ".join(map(str, self.alive)) or "none is alive"
            raise UsageError(f"--cluster: no node has {asked}, as {needs.what} asks for; nodes: {found}")
        return able

    def slots(self, needs: Needs) -> int:
        """Return how many tasks of these needs run at a time; a UsageError where no node can do one."""
        return sum(node.slots(needs) for node in self.able(needs))
