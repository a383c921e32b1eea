"""Graph networks in plain torch, trained on a whole generated graph."""

from __future__ import annotations

from actbench.workloads.graphs.settings import NETWORKS, GraphWorkload, Network

__all__ = ["NETWORKS", "GraphWorkload", "Network"]
