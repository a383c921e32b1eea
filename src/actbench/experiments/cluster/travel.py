"""What travels to the nodes, the files that cases and runs name, and where what came back was done."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from actbench.errors import UsageError
from actbench.experiments.cluster.node import Reply, Shared
from actbench.results.machine import provenance
from actbench.results.records import Case, Data
from actbench.results.runs import TrainingCase
from actbench.results.sources import sources

_MOST_BYTES = 2**20


def shared_of(cases: Iterable[Case | TrainingCase]) -> str:
    """Return what all requests of these cases share, as :class:`~actbench.experiments.cluster.node.Shared` in JSON.

    Raises:
        UsageError: As of :func:`files_of`.
    """
    return Shared(files=files_of(cases), sources=sources()).model_dump_json()


def files_of(cases: Iterable[Case | TrainingCase]) -> dict[str, str]:
    """Return the text of each ``.py`` and ``.toml`` file that models, schemes or device profiles name, by its path.

    A path that begins at the root, or with ``~``, is left to the nodes, which may share a file system.

    Raises:
        UsageError: A file is above the current folder, is not text, or has more than 1 MiB.
    """
    told = dict.fromkeys((case.model, case.scheme, getattr(case, "device_profile", None)) for case in cases)
    names = dict.fromkeys(name for each in told for name in _named(*each))
    ours = (name for name in names if not os.path.isabs(name) and not name.startswith("~"))
    return {name: _text(name) for name in ours if Path(name).is_file()}  # the node says of others that they are missing


def _named(model: str, scheme: str, device_profile: str | None) -> Iterator[str]:
    from actbench import schemes  # and with them torch, which reading results does without

    for spec in (model, *schemes.build(scheme).runs_files):
        file, _, name = spec.rpartition(":")
        if name and file.endswith(".py"):
            yield file
    if device_profile is not None and device_profile.endswith(".toml"):
        yield device_profile


def _text(name: str) -> str:
    if not Path(name).resolve().is_relative_to(Path.cwd().resolve()):
        raise UsageError(f"--cluster: {name} is outside of the current folder, and does not travel to the nodes")
    content = Path(name).read_bytes()
    if len(content) > _MOST_BYTES:
        raise UsageError(f"--cluster: {name} has {len(content):,} bytes; files of at most 1 MiB travel to nodes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--cluster: {name} is no text ({error.reason}), and does not travel to the nodes") from None


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
