"""Sums over the edges of a graph that save no messages: backward needs only the graph and the nodes' features.

``actbench::edge_sum(row_pointers, columns, weights, x)`` is the product of a sparse matrix, one for each head, with
the features of the nodes. ``actbench::edge_dot(row_pointers, columns, left, right)`` is the inner product of the
features at the two ends of each edge: the gradient of the weights of ``edge_sum``.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actbench.packing.refusals import first_order

library = torch.library.Library("actbench", "FRAGMENT")  # type: ignore[no-untyped-call]

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
        return _ops.edge_sum.default(row_pointers, columns, weights, x)  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, row_pointers, columns, reverse = ctx.saved_tensors
        x_grad = weights_grad = None
        if ctx.needs_input_grad[1]:
            weights_grad = _ops.edge_dot.default(row_pointers, columns, grad, x).to(weights.dtype)
        if ctx.needs_input_grad[0]:
            x_grad = _ops.edge_sum.default(row_pointers, columns, weights[reverse], grad)
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


def _edge_sum(row_pointers: Tensor, columns: Tensor, weights: Tensor, x: Tensor) -> Tensor:
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


def _edge_sum_fake(row_pointers: Tensor, columns: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    _check(row_pointers, columns, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _edge_dot(row_pointers: Tensor, columns: Tensor, left: Tensor, right: Tensor) -> Tensor:
    _check(row_pointers, columns, left)
    _, heads, width = left.shape
    products = left.new_empty(columns.numel(), heads)
    rows = torch.repeat_interleave(row_pointers.diff(), output_size=columns.numel())
    chunk = max(1, CHUNK_ELEMENTS // max(1, heads * width))
    for begin in range(0, columns.numel(), chunk):
        part = slice(begin, begin + chunk)
        torch.sum(left[rows[part]].mul_(right[columns[part]]), dim=2, out=products[part])
    return products


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


library.define(
    "edge_sum(Tensor row_pointers, Tensor columns, Tensor weights, Tensor x) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)  # type: ignore[no-untyped-call]
library.define(
    "edge_dot(Tensor row_pointers, Tensor columns, Tensor left, Tensor right) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)  # type: ignore[no-untyped-call]
for _key in ("CPU", "CUDA"):
    library.impl("edge_sum", _edge_sum, _key)  # type: ignore[no-untyped-call]
    library.impl("edge_dot", _edge_dot, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("actbench::edge_sum", _edge_sum_fake, lib=library)
torch.library.register_fake("actbench::edge_dot", _edge_dot_fake, lib=library)

_ops = torch.ops.actbench
