from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.errors import ModelError
from actbench.records import Built, Case
from actbench.training import Batch, TrainingSetup
from actbench.workloads import hub, inputs
from actbench.workloads.construct import construct, float_type
from actbench.workloads.graphs import generated
from actbench.workloads.graphs.aggregation import Graph
from actbench.workloads.graphs.settings import NETWORKS
from actbench.workloads.optimizers import make_optimizer

TASK = "node-classification"


class GraphWorkload:
    """A graph network on a whole generated graph, with cross-entropy at its training nodes.

    The batch size is the number of graphs: n copies of one graph side by side, with no edge between them, the features
    drawn anew in each. At 1 it is the usual full-batch training.

    Args:
        name: Name of the network.
        changes: Sizes to change, by key of its settings.
        case: Gives the types, the weights policy and the optimizer; lengths, image sizes and attention
            implementations mean nothing here.

    Raises:
        ModelError: A change is not possible, or another task or published weights are asked of it.
    """

    def __init__(self, name: str, changes: Mapping[str, Any], case: Case) -> None:
        if case.task not in ("auto", TASK):
            raise ModelError(f"--task {case.task}: {case.model} is a graph network and does {TASK}")
        if case.weights == "pretrained":
            raise ModelError(f"no pretrained weights for {case.model}: nobody publishes any; use --weights random")
        self.network = NETWORKS[name]
        self.settings = self.network.changed(changes, case.model)
        self.case = case
        self.spec = case.model
        self.weights_origin = "random"
        self.warnings: tuple[str, ...] = ()

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the network in training mode with its loss and optimizer."""
        module = construct(self.settings.network, materialize=materialize, seed=seed)
        self.weights_origin = "random" if materialize else hub.without_values(self.case.weights)
        return TrainingSetup(
            module=module.to(self._dtype),
            loss=_loss,
            make_optimizer=make_optimizer(self.case.optimizer),
            autocast_dtype=getattr(torch, self.case.autocast) if self.case.autocast else None,
            built=Built(model_class=type(module).__name__, task=TASK),
        )

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make a batch of ``batch_size`` graphs, with N nodes and E edges in all.

        Returns:
            ``features (N, num_features)`` of the case's type, ``labels`` and ``training_nodes`` int64 of one shape,
            ``row_pointers (N + 1,)``, ``columns (E,)`` and ``reverse (E,)`` int64 as in
            :class:`~actbench.workloads.graphs.aggregation.Graph`, and ``edges``: weights ``(E, 1)`` of the case's
            type, or for a GAT the rows ``(E,)`` int64.
        """
        random = inputs.generator(seed)
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
