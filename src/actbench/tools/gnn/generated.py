"""A generated graph like a network of citations: as large as ogbn-arxiv, with hubs and learnable classes.

Every shape follows from the sizes alone, so everything here works on fake tensors too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actbench.tools.gnn.aggregation import Graph

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
