"""Graph networks on ogbn-arxiv's scale, measured by ``actbench measure examples/graphs.py:gcn`` (or graphsage, gat).

The graph is generated: as large as ogbn-arxiv, with hubs and learnable classes. Every shape follows from the sizes
alone, so everything here works on fake tensors too. Sums over edges save no messages: ``graphs::edge_sum(row_pointers,
columns, weights, x)`` is the product of a sparse matrix, one for each head, with the features of the nodes, and
``graphs::edge_dot(row_pointers, columns, left, right)`` the inner product of the features at the two ends of each edge,
the gradient of its weights. For other sizes write a function of your own that returns ``build(...)``.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.packing.refusals import first_order

NODES, TRAINING_NODES = 169_343, 90_941
PAIRS = 1_157_799  # of ogbn-arxiv: 1,166,243 citations, of which 8,444 repeat another in the other direction

CHUNK_ELEMENTS = 2**22
"""Elements that ``edge_dot`` gathers at a time from each end of the edges: two temporaries of 16 MiB in float32."""


class Graph(NamedTuple):
    """A graph whose edges go both ways, as a compressed sparse matrix sorted by row and then column.

    Attributes:
        row_pointers: ``(nodes + 1,)`` int64, where the edges of each row begin.
        columns: ``(edges,)`` int64, the node that sends the message along each edge.
        reverse: ``(edges,)`` int64, the index of the same edge in the other direction: ``weights[reverse]`` are the
            weights of the transposed matrix.
    """

    row_pointers: Tensor
    columns: Tensor
    reverse: Tensor


def aggregate(x: Tensor, weights: Tensor, graph: Graph) -> Tensor:
    """Return for each node the weighted sum of its neighbours' features.

    Backward saves the graph and the weights, and ``x`` only if the weights need a gradient.

    Args:
        x: Features ``(nodes, heads, width)``.
        weights: ``(edges, heads)``.
        graph: The edges.

    Returns:
        ``(nodes, heads, width)`` of the dtype of ``x``. Second derivatives are refused.
    """
    summed: Tensor = _Aggregation.apply(x, weights, *graph)
    return summed


def softmax_over_edges(scores: Tensor, rows: Tensor, nodes: int) -> Tensor:
    """Return the softmax of scores over the edges of each row, computed in float32 or better; saves its result.

    Args:
        scores: ``(edges, heads)``.
        rows: ``(edges,)`` int64, the row of each edge.
        nodes: Number of rows.

    Returns:
        Shares like ``scores`` that sum to 1 over each row. Second derivatives are refused.
    """
    shares: Tensor = _EdgeSoftmax.apply(scores, rows, nodes)
    return shares


class _Aggregation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, row_pointers: Tensor, columns: Tensor, reverse: Tensor) -> Tensor:
        kept = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weights, row_pointers, columns, reverse)
        return edge_sum(row_pointers, columns, weights, x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, row_pointers, columns, reverse = ctx.saved_tensors
        x_grad = weights_grad = None
        if ctx.needs_input_grad[1]:
            weights_grad = edge_dot(row_pointers, columns, grad, x).to(weights.dtype)
        if ctx.needs_input_grad[0]:
            x_grad = edge_sum(row_pointers, columns, weights[reverse], grad)
        return x_grad, weights_grad, None, None, None


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, rows: Tensor, nodes: int) -> Tensor:
        wide = torch.promote_types(scores.dtype, torch.float32)
        largest = scores.new_full((nodes, scores.shape[1]), -torch.inf)
        largest.scatter_reduce_(0, rows[:, None].expand_as(scores), scores, "amax")
        powers = (scores - largest[rows]).to(wide).exp_()
        shares = powers.div_(_row_sums(powers, rows, nodes)[rows]).to(scores.dtype)
        ctx.save_for_backward(shares, rows)
        ctx.nodes = nodes
        return shares

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shares, rows = ctx.saved_tensors
        weighted = (grad * shares).to(torch.promote_types(shares.dtype, torch.float32))
        grad_of_scores = weighted.sub_(_row_sums(weighted, rows, ctx.nodes)[rows].mul_(shares))
        return grad_of_scores.to(shares.dtype), None, None


def _row_sums(values: Tensor, rows: Tensor, nodes: int) -> Tensor:
    return values.new_zeros(nodes, values.shape[1]).index_add_(0, rows, values)


@torch.library.custom_op("graphs::edge_sum", mutates_args=())
def edge_sum(row_pointers: Tensor, columns: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    _check(row_pointers, columns, x)
    summed = torch.empty_like(x, memory_format=torch.contiguous_format)
    nodes = row_pointers.numel() - 1
    _take_the_warning()
    for head in range(x.shape[1]):
        values = weights[:, head].to(x.dtype).contiguous()  # cuSPARSE takes no strides of values
        matrix = torch.sparse_csr_tensor(row_pointers, columns, values, (nodes, nodes), check_invariants=False)
        if x.is_cuda:
            torch.mm(matrix, x[:, head], out=summed[:, head])
        else:  # unlike MKL's product, the product with a reduction takes half types and does not copy the indices
            summed[:, head] = torch.sparse.mm(matrix, x[:, head], "sum")
    return summed


@edge_sum.register_fake
def _edge_sum_fake(row_pointers: Tensor, columns: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    _check(row_pointers, columns, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("graphs::edge_dot", mutates_args=())
def edge_dot(row_pointers: Tensor, columns: Tensor, left: Tensor, right: Tensor) -> Tensor:
    _check(row_pointers, columns, left)
    _, heads, width = left.shape
    products = left.new_empty(columns.numel(), heads)
    rows = torch.repeat_interleave(row_pointers.diff(), output_size=columns.numel())
    chunk = max(1, CHUNK_ELEMENTS // max(1, heads * width))
    for begin in range(0, columns.numel(), chunk):
        part = slice(begin, begin + chunk)
        torch.sum(left[rows[part]].mul_(right[columns[part]]), dim=2, out=products[part])
    return products


@edge_dot.register_fake
def _edge_dot_fake(row_pointers: Tensor, columns: Tensor, left: Tensor, right: Tensor) -> Tensor:
    _check(row_pointers, columns, left)
    return left.new_empty(columns.numel(), left.shape[1])


@functools.cache
def _take_the_warning() -> None:
    """Make a sparse matrix without a warning: torch warns once per process that their support is in beta state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = torch.zeros(1, dtype=torch.int64)
        torch.sparse_csr_tensor(index, index[:0], torch.empty(0), (0, 0), check_invariants=False)


def _check(row_pointers: Tensor, columns: Tensor, x: Tensor) -> None:
    """Raise a ValueError unless there is a row for each node."""
    if x.dim() != 3 or row_pointers.numel() != x.shape[0] + 1:
        raise ValueError(
            f"features must be (nodes, heads, width) with {row_pointers.numel() - 1} nodes, found {tuple(x.shape)}"
        )


HUBS = 3.0
"""Preference for early nodes: at 3, degrees follow a power law of exponent 2.5, and the largest is near the 13,161 of
ogbn-arxiv."""

HOMOPHILY = 0.65
"""Share of citations within one class; 0.655 in ogbn-arxiv."""

SIGNAL = 0.2
"""Standard deviation between the mean features of classes; within a class it is 1."""


def citations(nodes: int, edges: int, classes: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw distinct pairs of a node and an earlier node that it cites; node i has class i modulo ``classes``.

    Returns:
        The citing and the cited nodes, ``(edges,)`` int64 each, sorted by the citing and then by the cited node.
    """
    counts = _citations_of_each(nodes, edges, random)
    ends = counts.cumsum(0)
    place = torch.arange(edges)
    citing = torch.searchsorted(ends, place, right=True)
    count = counts[citing]
    rank = place - (ends - counts)[citing]
    # One draw from each of `count` equal parts of the past, so that few nodes are drawn twice.
    past = (rank + torch.rand(edges, generator=random, dtype=torch.float64)) / count
    cited = (past**HUBS * citing).long()
    same_class = cited - (cited - citing) % classes
    same_class = torch.where(same_class < 0, same_class + classes, same_class)
    alike = (torch.rand(edges, generator=random) < HOMOPHILY) & (same_class < citing)
    keys = (citing * nodes + torch.where(alike, same_class, cited)).sort().values
    distinct = (keys - place).cummax(0).values + place  # a node drawn twice becomes the next one
    return citing, torch.minimum(distinct - citing * nodes, citing - count + rank)


def adjacency(citing: Tensor, cited: Tensor, nodes: int, *, self_loops: bool) -> tuple[Graph, Tensor]:
    """Make the graph of pairs ``(pairs,)`` int64 of distinct nodes, each an edge in both directions.

    With ``self_loops`` each node is also its own neighbour.

    Returns:
        The graph, and the row of each of its edges, ``(edges,)`` int64.
    """
    loops = torch.arange(nodes if self_loops else 0)
    sources, targets = torch.cat((citing, cited, loops)), torch.cat((cited, citing, loops))
    order = (sources * nodes + targets).argsort()
    rows, columns = sources[order], targets[order]
    pairs, place = citing.numel(), torch.arange(order.numel())
    partner = torch.cat((place[pairs : 2 * pairs], place[:pairs], place[2 * pairs :]))
    sorted_place = torch.empty_like(order).scatter_(0, order, place)
    row_pointers = torch.searchsorted(rows, torch.arange(nodes + 1))
    return Graph(row_pointers, columns, sorted_place[partner[order]]), rows


def side_by_side(graph: Graph, copies: int) -> Graph:
    """Return ``copies`` of a graph as one graph, with no edge between them."""
    nodes, edges = graph.row_pointers.numel() - 1, graph.columns.numel()
    starts = repeated(graph.row_pointers[:-1], copies, edges)
    return Graph(
        torch.cat((starts, torch.tensor([copies * edges]))),
        repeated(graph.columns, copies, nodes),
        repeated(graph.reverse, copies, edges),
    )


def repeated(values: Tensor, copies: int, step: int) -> Tensor:
    """Repeat a vector of int64, adding ``step`` more in each copy."""
    return (values + step * torch.arange(copies)[:, None]).reshape(-1)


def symmetric_weights(graph: Graph, rows: Tensor) -> Tensor:
    """Return 1 / sqrt(d_i d_j) for each edge, with d the degrees of its two nodes, ``(edges, 1)`` float32.

    Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", arXiv 1609.02907, equation 2;
    the graph itself has the self-loops.
    """
    scale = graph.row_pointers.diff().float().rsqrt()
    return (scale[rows] * scale[graph.columns])[:, None]


def mean_weights(graph: Graph, rows: Tensor) -> Tensor:
    """Return one over the degree of the row of each edge, ``(edges, 1)`` float32."""
    return graph.row_pointers.diff().float().reciprocal()[rows, None]


def features(labels: Tensor, width: int, classes: int, random: torch.Generator) -> Tensor:
    """Draw the features of each node around the mean of its class, ``(nodes, width)`` float32."""
    means = SIGNAL * torch.randn(classes, width, generator=random)
    return means[labels] + torch.randn(labels.numel(), width, generator=random)


def _citations_of_each(nodes: int, edges: int, random: torch.Generator) -> Tensor:
    """Return how many earlier nodes each node cites, ``(nodes,)`` int64 with the sum ``edges``."""
    # If each node cites `usual` others, or as many as precede it, there are usual * nodes - usual (usual + 1) / 2
    # citations. The largest `usual` that makes no more than `edges` of them is the smaller root, rounded down.
    twice = 2 * nodes - 1
    usual = (twice - math.isqrt(twice**2 - 8 * edges - 1) - 1) // 2
    node = torch.arange(nodes)
    spare = edges - (usual * nodes - usual * (usual + 1) // 2)
    later = max(1, nodes - 1 - usual)  # nodes that can cite one more; the spare citations are spread evenly over them
    turn = (node - usual - 1).clamp(0, later)
    more = ((turn + 1) * spare // later - turn * spare // later) * (node > usual)
    counts = node.clamp(max=usual) + more
    # In each pair, one node gives some of its citations to the other, which must have as many nodes before it.
    pairs = counts[: nodes // 2 * 2].view(-1, 2)
    given = torch.randint(usual + 1, pairs.shape[:1], generator=random) * (node[: nodes // 2 * 2 : 2] >= 2 * usual + 2)
    pairs += torch.stack((given, -given), dim=1)
    return counts


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
        return self.neighbours(mean) + self.own(x)


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
        return aggregate(projected, shares, graph).flatten(1) + self.residual(x)


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
        return self.last(x, graph, weights)


class GraphSAGE(GCN):
    """Hidden layers of :class:`MeanConvolution`, and a last one for the class scores."""

    convolution = MeanConvolution


class GAT(nn.Module):
    """Hidden layers of :class:`AttentionConvolution`, and a last one of one head; ``width`` is the width of a head."""

    def __init__(self, sizes: tuple[int, ...], dropout: float, heads: int = 3) -> None:
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
        return self.last(x, graph, rows) + self.bias


def build(
    network: type[nn.Module],
    *,
    hidden_size: int = 256,
    num_layers: int = 3,
    dropout: float = 0.5,
    nodes: int = NODES,
    pairs: int = PAIRS,
    width: int = 128,
    classes: int = 40,
) -> tuple[nn.Module, Callable[[int], Mapping[str, Tensor]], Callable[[nn.Module, Mapping[str, Tensor]], Tensor]]:
    """Return a network of ``num_layers`` layers, its batches of whole graphs, and its loss at the training nodes.

    ``pairs`` are pairs of nodes with an edge in both directions, and ``width`` is that of a node's features. A sample
    is a graph: n copies of one graph with no edge between them, each with its own features. One sample is the usual
    full-batch training.
    """
    module = network((width, *[hidden_size] * (num_layers - 1), classes), dropout)
    training_nodes = max(1, nodes * TRAINING_NODES // NODES)

    def make_batch(n: int) -> Mapping[str, Tensor]:
        random = torch.Generator().manual_seed(torch.initial_seed())
        citing, cited = citations(nodes, pairs, classes, random)
        graph, rows = adjacency(citing, cited, nodes, self_loops=network is not GraphSAGE)
        rows, graph = repeated(rows, n, nodes), side_by_side(graph, n)
        labels = (torch.arange(nodes) % classes).repeat(n)
        training = repeated(torch.arange(training_nodes), n, nodes)
        edges = {GCN: symmetric_weights, GraphSAGE: mean_weights, GAT: lambda graph, rows: rows}[network](graph, rows)
        drawn = features(labels, width, classes, random)
        return {"features": drawn, "labels": labels[training], "training": training, "edges": edges, **graph._asdict()}

    return module, make_batch, loss


def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross-entropy at the training nodes."""
    graph = Graph(batch["row_pointers"], batch["columns"], batch["reverse"])
    scores = module(batch["features"], graph, batch["edges"])
    return F.cross_entropy(scores[batch["training"]], batch["labels"])


def gcn():
    """Return OGB's GCN example on ogbn-arxiv."""
    return build(GCN)


def graphsage():
    """Return OGB's GraphSAGE example on ogbn-arxiv."""
    return build(GraphSAGE)


def gat():
    """Return DGL's example on ogbn-arxiv: ``hidden_size`` is the width of each of 3 heads."""
    return build(GAT, hidden_size=250, dropout=0.75)
