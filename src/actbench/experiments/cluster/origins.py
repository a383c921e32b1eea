"""Where what the nodes of a cluster did was done, for the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from actbench.experiments.cluster.node import Reply
from actbench.results.machine import provenance
from actbench.results.records import Data

CaseT = TypeVar("CaseT", bound=Data)


@dataclass
class Origins(Generic[CaseT]):
    """Machine, versions and command of the records of cases that ended and were not stored yet.

    All records of a node share one description of it.
    """

    command: str
    _of: dict[CaseT, Mapping[str, Any]] = field(default_factory=dict)
    _shared: dict[tuple[Any, ...], Mapping[str, Any]] = field(default_factory=dict)

    def note(self, cases: Iterable[CaseT], reply: Reply | None) -> None:
        """Note where cases ended; None where a node was lost with them: this machine says so."""
        key = () if reply is None else (reply.machine, reply.versions)
        if key not in self._shared:
            said = provenance(self.command) if reply is None else {"machine": reply.machine, "versions": reply.versions}
            self._shared[key] = {**said, "command": self.command}
        self._of.update(dict.fromkeys(cases, self._shared[key]))

    def pop(self, case: CaseT) -> Mapping[str, Any]:
        """Return the provenance fields of a case's record, and forget the case."""
        return self._of.pop(case)
