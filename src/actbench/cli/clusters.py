"""The flags that send cases to a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

from actbench import plugins
from actbench.cli.app import option
from actbench.cli.launcher import RANKS
from actbench.errors import UsageError, boundary

if TYPE_CHECKING:
    from actbench.run.executor import Machines

RAY = "cluster"
"""The executor of addresses that begin with no other's name."""
_LEAST = 0.0001  # smallest amount that Ray counts
_OTHERS = {
    "CPU": "a simulated case asks for one core, one of --meter cpu for all of a node",
    "GPU": "--gpus-per-case says how many GPUs a case asks for",
    "object_store_memory": "cases keep nothing in Ray's object store",
    "bundle": "cases stand in no placement group",
}


@runtime_checkable
class Opening(Protocol):
    """What an entry point of ``actbench.executors`` names, which ``--cluster NAME://ADDRESS`` asks for."""

    def __call__(self, address: str, gpus: float, resources: Mapping[str, float]) -> Machines:
        """Return the machines at an address; nothing is started yet.

        Args:
            address: What follows ``NAME://``.
            gpus: How many GPUs a case asks for that runs on one; it may be a part of one.
            resources: What else each case asks for: ``--resources``.
        """
        ...


@dataclass(frozen=True)
class ClusterFlags:
    """Where cases run."""

    cluster: Annotated[
        str | None,
        option(
            "--cluster",
            "Run on the nodes of a Ray cluster (actbench[cluster]): auto, ray://HOST:PORT or HOST:PORT; or "
            "NAME://ADDRESS, for the executor of another package. Rows come back to this machine's results file; "
            "docs/cluster.md.",
            only_typed=True,
            metavar="ADDRESS",
        ),
    ] = None
    resources: Annotated[
        str | None,
        option(
            "--resources",
            "With --cluster: other resources of each case, by Ray's names: a100=1,memory=8e9 (bytes).",
            metavar="NAME=AMOUNT",
        ),
    ] = None

    @property
    def chosen(self) -> Machines | None:
        """The requested cluster, or None; a UsageError for wrong resources."""
        address = self.cluster
        if address is None:
            return None
        gpus, resources = self._gpus, _amounts(self.resources or "")
        name, place = _parted(address)
        opened = _opening(name, address)
        with boundary(f"--cluster {address}: {name} cannot be used", UsageError):  # a stranger's code
            return opened(place, gpus, resources)

    @property
    def _gpus(self) -> float:
        """How many GPUs a case asks for that runs on one."""
        return 1.0


@dataclass(frozen=True)
class GpuClusterFlags(ClusterFlags):
    """Where cases run, if some need a GPU."""

    gpus_per_case: Annotated[
        float | None,
        option("--gpus-per-case", "With --cluster: GPUs of a case that runs on one; 0.5 is half a GPU.", min=0),
    ] = None

    @property
    def _gpus(self) -> float:
        gpus = 1.0 if self.gpus_per_case is None else self.gpus_per_case
        if not 0 < gpus <= 1 and (gpus == 0 or not gpus.is_integer()):
            raise UsageError(f"--gpus-per-case {gpus:g}: give a part of one GPU, such as 0.5, or a whole number")
        return gpus


def _parted(address: str) -> tuple[str, str]:
    """Return the name of an executor, and the address that it is asked for; Ray's own begin with no name but ray."""
    name, given, place = address.partition("://")
    return (RAY, address) if not given or name == "ray" else (name, place)


def _opening(name: str, address: str) -> Opening:
    """Return what starts an executor; a UsageError if no package brings it, or it cannot be used."""
    known = [each for each in plugins.installed("executors") if each != RANKS]
    found = plugins.find_plugin("executors", name, Opening) if name in known else None  # type: ignore[type-abstract]
    if found is None and name == RAY:
        raise UsageError("--cluster: no installed package measures on a cluster, or it cannot be used")
    if found is None:
        others = ", ".join(["ray://", *(f"{each}://" for each in known if each != RAY)])
        why = f"no installed package brings the executor {name!r}, or it cannot be used"
        raise UsageError(f"--cluster {address}: {why}; there are: {others}")
    return found


def _amounts(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, amount = map(str.strip, part.partition("="))
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = math.nan
        if name in _OTHERS:
            raise UsageError(f"--resources {part!r}: {_OTHERS[name]}")
        if not name or not _LEAST <= found[name] < math.inf:
            raise UsageError(f"--resources {part!r}: give a name and an amount of at least {_LEAST}, such as a100=1")
    return found
