"""The flags that send the cases of a sweep to a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import option
from actbench.errors import UsageError

if TYPE_CHECKING:
    from actbench.experiments.cluster.cluster import Cluster


_LEAST = 0.0001  # smallest amount that Ray counts
_OTHERS = {
    "CPU": "a simulated case asks for one core, and one of --meter cpu for all of a node",
    "GPU": "--gpus-per-case says how many GPUs a case asks for",
    "object_store_memory": "cases keep nothing in Ray's object store",
    "bundle": "cases stand in no placement group",
}


@dataclass(frozen=True)
class ClusterFlags:
    """Where cases are measured."""

    cluster: Annotated[
        str | None,
        option(
            "--cluster",
            "Measure on the nodes of a Ray cluster (actbench[cluster]): auto, ray://HOST:PORT or HOST:PORT. Rows come "
            "back to this machine's results file; docs/cluster.md.",
            metavar="ADDRESS",
        ),
    ] = None
    gpus_per_case: Annotated[
        float | None,
        option("--gpus-per-case", "With --cluster: GPUs, or a part of one, for a case of --meter cuda.", min=0),
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
    def chosen(self) -> Cluster | None:
        """The requested cluster, or None.

        Raises:
            UsageError: A flag for clusters is given without --cluster, or resources are no amounts.
        """
        if self.cluster is None:
            if self.gpus_per_case is not None or self.resources is not None:
                raise UsageError("--gpus-per-case and --resources are for --cluster: give it, or leave them out")
            return None
        from actbench.experiments.cluster.cluster import Cluster

        gpus = 1.0 if self.gpus_per_case is None else self.gpus_per_case
        if not 0 < gpus <= 1 and (gpus == 0 or not gpus.is_integer()):
            raise UsageError(f"--gpus-per-case {gpus:g}: give a part of one GPU, such as 0.5, or a whole number")
        return Cluster(self.cluster, gpus, _amounts(self.resources or ""))


def _amounts(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            found[name.strip()] = math.nan
        if name.strip() in _OTHERS:
            raise UsageError(f"--resources {part!r}: {_OTHERS[name.strip()]}")
        if not name.strip() or not _LEAST <= found[name.strip()] < math.inf:
            raise UsageError(f"--resources {part!r}: give a name and an amount of at least {_LEAST}, such as a100=1")
    return found
