"""Which graph networks there are, and what of them and of their graph can be changed after the ``@``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError
from torch import Tensor, nn

from actbench.errors import ModelError
from actbench.records import Data
from actbench.workloads.graphs import generated
from actbench.workloads.graphs.aggregation import Graph
from actbench.workloads.graphs.networks import GAT, GCN, GraphSAGE

ARXIV_NODES, ARXIV_TRAINING_NODES = 169_343, 90_941
ARXIV_PAIRS = 1_157_799  # of its 1,166,243 citations 8,444 are answered by one in the other direction

Count = Annotated[int, Field(strict=True, gt=0)]


class Settings(Data):
    """Sizes of a graph network and of its graph; by default those of OGB's GCN example on ogbn-arxiv.

    Attributes:
        hidden_size: Width of the hidden layers.
        num_layers: Layers, the last one included.
        dropout: Share of activations that each hidden layer drops.
        num_nodes: Nodes of one graph.
        num_edges: Pairs of nodes with an edge; each pair has it in both directions.
        num_features: Width of a node's features.
        num_classes: Classes of nodes.
    """

    hidden_size: Count = 256
    num_layers: Count = 3
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.5
    num_nodes: Annotated[int, Field(strict=True, gt=1)] = ARXIV_NODES
    num_edges: Count = ARXIV_PAIRS
    num_features: Count = 128
    num_classes: Annotated[int, Field(strict=True, gt=1)] = 40

    @property
    def sizes(self) -> tuple[int, ...]:
        """Width of the features, of each hidden layer, and of the class scores."""
        return (self.num_features, *[self.hidden_size] * (self.num_layers - 1), self.num_classes)

    @property
    def training_nodes(self) -> int:
        """How many nodes have a part in the loss: the first ones, in the proportion of ogbn-arxiv."""
        return max(1, self.num_nodes * ARXIV_TRAINING_NODES // ARXIV_NODES)

    def network(self) -> nn.Module:
        """Build the network."""
        return GCN(self.sizes, self.dropout)


class SageSettings(Settings):
    """A GraphSAGE, by default of the sizes of OGB's example."""

    def network(self) -> nn.Module:
        """Build the network."""
        return GraphSAGE(self.sizes, self.dropout)


class AttentionSettings(Settings):
    """A GAT, by default of the sizes of DGL's example on ogbn-arxiv.

    Attributes:
        hidden_size: Width of each head.
        num_heads: Heads of the hidden layers.
    """

    hidden_size: Count = 250
    num_heads: Count = 3
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.75

    def network(self) -> nn.Module:
        """Build the network."""
        return GAT(self.sizes, self.dropout, self.num_heads)


@dataclass(frozen=True)
class Network:
    """A graph network by its name.

    Attributes:
        settings: What of it can be changed.
        self_loops: Whether its graph has an edge from each node to itself.
        edges: From the graph and the row of each edge to what the network takes beside the graph.
        note: One line for ``actbench models``.
    """

    settings: type[Settings]
    self_loops: bool
    edges: Callable[[Graph, Tensor], Tensor]
    note: str

    def changed(self, changes: Mapping[str, Any], spec: str) -> Settings:
        """Return its settings with some of them changed.

        Raises:
            ModelError: A key does not exist, or a value is not one of its.
        """
        keys = list(self.settings.model_fields)
        for key in changes:
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise ModelError(f"model {spec!r}: there is no key {key!r}; {hint}The keys are {', '.join(keys)}")
        try:
            settings = self.settings(**changes)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            raise ModelError(f"model {spec!r}: {key}={changes[key]}: {first['msg'].lower()}") from None
        most = settings.num_nodes * (settings.num_nodes - 1) // 2
        if settings.num_edges > most:
            raise ModelError(
                f"model {spec!r}: {settings.num_nodes} nodes have {most} pairs, and num_edges is {settings.num_edges}; "
                f"give num_edges={most} or less"
            )
        return settings


NETWORKS = {
    "gcn": Network(
        Settings,
        self_loops=True,
        edges=generated.symmetric_weights,
        note="3 layers of 256; a sample is a graph like ogbn-arxiv",
    ),
    "graphsage": Network(
        SageSettings,
        self_loops=False,
        edges=generated.mean_weights,
        note="3 layers of 256; a sample is a graph like ogbn-arxiv",
    ),
    "gat": Network(
        AttentionSettings,
        self_loops=True,
        edges=lambda graph, rows: rows,
        note="3 layers of 3 heads of 250; a sample is a graph like ogbn-arxiv",
    ),
}
"""The networks by name. Each one's graph is as large as ogbn-arxiv unless changed."""
