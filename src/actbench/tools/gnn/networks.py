"""GCN, GraphSAGE and GAT in plain torch, as in their usual examples on ogbn-arxiv."""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.tools.gnn.aggregation import Graph, aggregate, softmax_over_edges

NEGATIVE_SLOPE = 0.2
INPUT_DROPOUT = 0.1


class GraphConvolution(nn.Module):
    """The layer of a GCN: a linear layer, then the sum over neighbours and the node itself.

    Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", arXiv 1609.02907, equation 2.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.linear.weight)

    def forward(self, x: Tensor, graph: Graph, weights: Tensor) -> Tensor:
        """Return ``(nodes, outputs)`` from ``x (nodes, inputs)`` and ``weights (edges, 1)``."""
        return aggregate(self.linear(x)[:, None], weights, graph)[:, 0] + self.bias


class MeanConvolution(nn.Module):
    """The layer of a GraphSAGE with mean aggregation: one linear layer on the neighbours' mean, one on the node.

    Hamilton et al., "Inductive Representation Learning on Large Graphs", arXiv 1706.02216, algorithm 1. The sum of two
    products replaces the product with a concatenation. Nothing is sampled: each node has all of its neighbours.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.neighbours = nn.Linear(inputs, outputs)
        self.own = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, graph: Graph, weights: Tensor) -> Tensor:
        """Return ``(nodes, outputs)`` from ``x (nodes, inputs)`` and ``weights (edges, 1)``."""
        mean = aggregate(x[:, None], weights, graph)[:, 0]
        return self.neighbours(mean) + self.own(x)  # type: ignore[no-any-return]


class AttentionConvolution(nn.Module):
    """The layer of a GAT: each head weighs neighbours by a softmax over scores of two vectors; plus a residual.

    Velickovic et al., "Graph Attention Networks", arXiv 1710.10903, equations 3 and 4.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(inputs, heads * outputs, bias=False)
        self.residual = nn.Linear(inputs, heads * outputs, bias=False)
        self.of_neighbour = nn.Parameter(torch.empty(heads, outputs))
        self.of_node = nn.Parameter(torch.empty(heads, outputs))
        for parameter in self.parameters():
            nn.init.xavier_normal_(parameter, gain=nn.init.calculate_gain("relu"))

    def forward(self, x: Tensor, graph: Graph, rows: Tensor) -> Tensor:
        """Return ``(nodes, heads * outputs)`` from ``x (nodes, inputs)`` and ``rows (edges,)``."""
        nodes = x.shape[0]
        projected = self.linear(x).view(nodes, self.heads, -1)
        neighbour = (projected * self.of_neighbour).sum(-1)
        node = (projected * self.of_node).sum(-1)
        scores = F.leaky_relu(node[rows] + neighbour[graph.columns], NEGATIVE_SLOPE)
        shares = softmax_over_edges(scores, rows, nodes)
        return aggregate(projected, shares, graph).flatten(1) + self.residual(x)  # type: ignore[no-any-return]


class GraphBlock(nn.Module):
    """A hidden layer: a convolution, batch norm, ReLU and dropout; the last two are functions, not modules."""

    is_block = True

    def __init__(self, convolution: nn.Module, width: int, dropout: float) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = nn.BatchNorm1d(width)
        self.dropout = dropout

    def forward(self, x: Tensor, graph: Graph, edges: Tensor) -> Tensor:
        """Return ``(nodes, width)``; ``edges`` is the third argument of the convolution."""
        x = F.relu(self.norm(self.convolution(x, graph, edges)))
        return F.dropout(x, self.dropout, self.training)


class GCN(nn.Module):
    """Hidden layers of :class:`GraphConvolution`, and a last one for the class scores."""

    convolution: ClassVar[type[GraphConvolution | MeanConvolution]] = GraphConvolution

    def __init__(self, sizes: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            GraphBlock(self.convolution(inputs, outputs), outputs, dropout)
            for inputs, outputs in itertools.pairwise(sizes[:-1])
        )
        self.last = self.convolution(*sizes[-2:])

    def forward(self, x: Tensor, graph: Graph, weights: Tensor) -> Tensor:
        """Return class scores ``(nodes, classes)`` from features ``(nodes, inputs)`` and ``weights (edges, 1)``."""
        for layer in self.layers:
            x = layer(x, graph, weights)
        return self.last(x, graph, weights)  # type: ignore[no-any-return]


class GraphSAGE(GCN):
    """Hidden layers of :class:`MeanConvolution`, and a last one for the class scores."""

    convolution = MeanConvolution


class GAT(nn.Module):
    """Hidden layers of :class:`AttentionConvolution`, and a last one of one head; ``width`` is the width of a head."""

    def __init__(self, sizes: tuple[int, ...], dropout: float, heads: int) -> None:
        super().__init__()
        inputs = (sizes[0], *(heads * size for size in sizes[1:-1]))
        self.layers = nn.ModuleList(
            GraphBlock(AttentionConvolution(width, size, heads), heads * size, dropout)
            for width, size in zip(inputs[:-1], sizes[1:-1], strict=True)
        )
        self.last = AttentionConvolution(inputs[-1], sizes[-1], heads=1)
        self.bias = nn.Parameter(torch.zeros(sizes[-1]))

    def forward(self, x: Tensor, graph: Graph, rows: Tensor) -> Tensor:
        """Return class scores ``(nodes, classes)`` from features ``(nodes, inputs)`` and ``rows (edges,)`` int64."""
        x = F.dropout(x, INPUT_DROPOUT, self.training)
        for layer in self.layers:
            x = layer(x, graph, rows)
        return self.last(x, graph, rows) + self.bias  # type: ignore[no-any-return]
