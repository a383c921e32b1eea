"""Graph networks as workloads: their names, and their settings after the ``@``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.errors import ModelError
from actbench.model.data import Data
from actbench.model.records import Built, Case, Task
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.tools.gnn import generated
from actbench.tools.gnn.aggregation import Graph
from actbench.tools.gnn.networks import GAT, GCN, GraphSAGE
from actbench.validation import sentence
from actbench.workload import base, folder
from actbench.workload.base import construct, float_type

ARXIV_NODES, ARXIV_TRAINING_NODES = 169_343, 90_941
ARXIV_PAIRS = 1_157_799  # 1,166,243 citations, of which 8,444 repeat another in the other direction

TASK: Final = "node-classification"

Count = Annotated[int, Field(strict=True, gt=0)]


class Settings(Data):
    """Sizes of a graph network and of its graph; the defaults are OGB's GCN example on ogbn-arxiv.

    Attributes:
        num_layers: Number of layers, with the last one.
        dropout: Share of activations that each hidden layer drops.
        num_nodes: Nodes of one graph.
        num_edges: Pairs of nodes with an edge in both directions.
        num_features: Width of a node's features.
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
        """The number of first nodes that the loss counts; the same share of nodes as in ogbn-arxiv."""
        return max(1, self.num_nodes * ARXIV_TRAINING_NODES // ARXIV_NODES)


class AttentionSettings(Settings):
    """Sizes of a GAT; the defaults are DGL's example on ogbn-arxiv. ``hidden_size`` is the width of each head."""

    hidden_size: Count = 250
    num_heads: Count = 3
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.75


@dataclass(frozen=True)
class Network:
    """A kind of graph network.

    ``module`` builds it from its settings. ``edges`` makes the third argument of its forward pass, from the graph and
    the row of each edge.
    """

    settings: type[Settings]
    module: Callable[[Any], nn.Module]
    self_loops: bool
    edges: Callable[[Graph, Tensor], Tensor]
    note: str
    task: ClassVar[Task] = TASK

    def __call__(self, changes: Mapping[str, Any], case: Case) -> GraphWorkload:
        """Return the workload of a case; ``changes`` follow the ``@`` of its model."""
        return GraphWorkload(self, changes, case)

    def changed(self, changes: Mapping[str, Any], spec: str) -> Settings:
        """Return the settings with changes; a ModelError if a key does not exist, or a value is wrong."""
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
            raise ModelError(f"model {spec!r}: {sentence(f'{key}={changes[key]}', first['msg'])}") from None
        most = settings.num_nodes * (settings.num_nodes - 1) // 2
        if settings.num_edges > most:
            raise ModelError(
                f"model {spec!r}: {settings.num_nodes} nodes have {most} pairs, and num_edges is {settings.num_edges}; "
                f"give num_edges={most} or less"
            )
        return settings


_NOTE = "{}; a sample is a graph like ogbn-arxiv"

GCN_NETWORK: Final = Network(
    Settings,
    lambda settings: GCN(settings.sizes, settings.dropout),
    self_loops=True,
    edges=generated.symmetric_weights,
    note=_NOTE.format("3 layers of 256"),
)
GRAPHSAGE_NETWORK: Final = Network(
    Settings,
    lambda settings: GraphSAGE(settings.sizes, settings.dropout),
    self_loops=False,
    edges=generated.mean_weights,
    note=_NOTE.format("3 layers of 256"),
)
GAT_NETWORK: Final = Network(
    AttentionSettings,
    lambda settings: GAT(settings.sizes, settings.dropout, settings.num_heads),
    self_loops=True,
    edges=lambda graph, rows: rows,
    note=_NOTE.format("3 layers of 3 heads of 250"),
)


class GraphWorkload(base.Workload):
    """A graph network on a whole generated graph, with cross-entropy at its training nodes.

    The batch size is the number of graphs: n copies of one graph with no edge between them, each with its own
    features. Batch size 1 is the usual full-batch training. ``changes`` are changes of the settings. Sequence length,
    image size and attention implementation have no effect.

    Raises:
        ModelError: A change is impossible, or the case asks for another task or published weights.
    """

    def __init__(self, network: Network, changes: Mapping[str, Any], case: Case) -> None:
        if case.task not in ("auto", TASK):
            raise ModelError(f"--task {case.task}: {case.model} is a graph network and does {TASK}")
        if case.weights == "pretrained":
            raise ModelError(f"no pretrained weights for {case.model}: nobody publishes any; use --weights random")
        if case.target_length is not None:
            raise ModelError(f"--target-length: {case.model} is a graph network, and writes no text; leave it out")
        self.network = network
        self.settings = self.network.changed(changes, case.model)
        self.case = case
        self.spec = case.model

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the network in training mode with its loss and optimizer."""
        module = construct(lambda: self.network.module(self.settings), materialize=materialize, seed=seed)
        self.weights_origin = "random" if materialize else folder.without_values(self.case.weights)
        built = Built(model_class=type(module).__name__, task=TASK)
        return base.setup_of(self.case, module.to(self._dtype), _loss, built=built)

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make a batch of ``batch_size`` graphs, with N nodes and E edges in all.

        Returns:
            ``features (N, num_features)`` of the case's type, ``labels`` and ``training_nodes`` int64 of one shape,
            ``row_pointers (N + 1,)``, ``columns (E,)`` and ``reverse (E,)`` int64 as in
            :class:`~actbench.tools.gnn.aggregation.Graph`, and ``edges``: weights ``(E, 1)`` of the case's
            type, or for a GAT the rows ``(E,)`` int64.
        """
        random = base.generator(seed)
        nodes, classes = self.settings.num_nodes, self.settings.num_classes
        citing, cited = generated.citations(nodes, self.settings.num_edges, classes, random)
        graph, rows = generated.adjacency(citing, cited, nodes, self_loops=self.network.self_loops)
        rows = generated.repeated(rows, batch_size, nodes)
        graph = generated.side_by_side(graph, batch_size)
        labels = (torch.arange(nodes) % classes).repeat(batch_size)
        training = generated.repeated(torch.arange(self.settings.training_nodes), batch_size, nodes)
        edges = self.network.edges(graph, rows)
        return {
            "features": generated.features(labels, self.settings.num_features, classes, random).to(self._dtype),
            "labels": labels[training],
            "training_nodes": training,
            **graph._asdict(),
            "edges": edges.to(self._dtype) if edges.is_floating_point() else edges,
        }

    @property
    def _dtype(self) -> torch.dtype:
        return float_type(self.case)


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    graph = Graph(batch["row_pointers"], batch["columns"], batch["reverse"])
    scores: Tensor = module(batch["features"], graph, batch["edges"])
    return F.cross_entropy(scores[batch["training_nodes"]], batch["labels"])
