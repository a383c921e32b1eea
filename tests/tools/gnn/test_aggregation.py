from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from actbench.tools.gnn import aggregation
from actbench.tools.gnn.aggregation import Graph, aggregate, softmax_over_edges
from actbench.tools.gnn.generated import adjacency, citations

NODES, PAIRS = 12, 25


def made(seed: int = 0, *, self_loops: bool = True) -> tuple[Graph, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return adjacency(*citations(NODES, PAIRS, 3, random), NODES, self_loops=self_loops)


def dense(weights: Tensor, graph: Graph, rows: Tensor) -> Tensor:
    """Return the matrix of each head, ``(heads, nodes, nodes)``."""
    matrix = weights.new_zeros(weights.shape[1], NODES, NODES)
    matrix[:, rows, graph.columns] = weights.T
    return matrix


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("self_loops", [False, True])
def test_sums_and_gradients_are_those_of_the_dense_matrix(heads: int, self_loops: bool) -> None:
    graph, rows = made(self_loops=self_loops)
    x = torch.randn(NODES, heads, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(rows.numel(), heads, dtype=torch.float64, requires_grad=True)
    wanted = torch.einsum("hij,jhw->ihw", dense(weights, graph, rows), x)
    grad = torch.randn_like(wanted)

    found = aggregate(x, weights, graph)

    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, (x, weights), grad), torch.autograd.grad(wanted, (x, weights), grad)
    )


def test_both_gradients_pass_gradcheck() -> None:
    graph, rows = made()
    x = torch.randn(NODES, 2, 3, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(rows.numel(), 2, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x, s: aggregate(x, s, graph), (x, scores))
    assert torch.autograd.gradcheck(lambda s: softmax_over_edges(s, rows, NODES), (scores,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_give_what_float32_gives_rounded(dtype: torch.dtype) -> None:
    graph, rows = made()
    x, weights = torch.randint(-4, 5, (NODES, 2, 3)).to(dtype), torch.randint(-2, 3, (rows.numel(), 2)).to(dtype)

    found = aggregate(x, weights, graph)

    assert found.dtype == dtype
    assert torch.equal(found.float(), aggregate(x.float(), weights.float(), graph))  # small integers are exact
    assert softmax_over_edges(weights, rows, NODES).dtype == dtype


def test_inputs_need_not_be_contiguous() -> None:
    graph, rows = made()
    x, weights = torch.randn(3, 2, NODES).permute(2, 1, 0), torch.randn(2, rows.numel()).T

    torch.testing.assert_close(aggregate(x, weights, graph), aggregate(x.contiguous(), weights.contiguous(), graph))


def test_the_softmax_of_a_row_is_that_of_its_scores_even_of_large_ones() -> None:
    graph, rows = made()
    scores = 200 * torch.randn(rows.numel(), 2)

    shares = softmax_over_edges(scores, rows, NODES)

    for node, (begin, end) in enumerate(zip(graph.row_pointers[:-1], graph.row_pointers[1:], strict=True)):
        torch.testing.assert_close(shares[begin:end], scores[begin:end].softmax(0), msg=f"node {node}")


@pytest.mark.parametrize(("trained", "kept"), [(False, 0), (True, NODES * 1 * 8 * 4)])
def test_features_are_saved_only_for_the_gradient_of_weights(trained: bool, kept: int) -> None:
    graph, rows = made()
    x = torch.randn(NODES, 1, 8, requires_grad=True)
    weights = torch.ones(rows.numel(), 1, requires_grad=trained)
    saved: list[Tensor] = []

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        aggregate(x, weights, graph)

    assert {t.data_ptr() for t in saved} - {x.data_ptr()} == {t.data_ptr() for t in (weights, *graph)}
    assert sum(t.nbytes for t in saved if t.data_ptr() == x.data_ptr()) == kept


def test_chunks_of_edges_give_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = made()
    left, right = torch.randn(2, NODES, 2, 3)
    arguments = (graph.row_pointers, graph.columns, left, right)
    whole = torch.ops.actbench.edge_dot(*arguments)

    monkeypatch.setattr(aggregation, "CHUNK_ELEMENTS", 4 * 2 * 3)

    assert graph.columns.numel() % 4
    assert torch.equal(torch.ops.actbench.edge_dot(*arguments), whole)


def test_the_operators_are_as_torch_wants_them() -> None:
    graph, rows = made()
    left, right = torch.randn(2, NODES, 2, 3)
    weights = torch.randn(rows.numel(), 2)

    torch.library.opcheck(torch.ops.actbench.edge_sum.default, (graph.row_pointers, graph.columns, weights, left))
    torch.library.opcheck(torch.ops.actbench.edge_dot.default, (graph.row_pointers, graph.columns, left, right))


def test_features_of_other_nodes_are_refused() -> None:
    graph, rows = made()

    with pytest.raises(ValueError, match=f"{NODES} nodes, found \\(11, 1, 3\\)"):
        aggregate(torch.randn(11, 1, 3), torch.ones(rows.numel(), 1), graph)


@pytest.mark.exhaustive
def test_torch_does_not_warn_of_its_sparse_matrices() -> None:
    code = (
        "import torch\nfrom actbench.tools.gnn.aggregation import Graph, aggregate\n"
        "graph = Graph(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([1, 0]))\n"
        "print(aggregate(torch.tensor([[[1.0]], [[2.0]]]), torch.ones(2, 1), graph).flatten().tolist())"
    )

    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("[2.0, 1.0]\n", "")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cuda_gives_what_the_cpu_gives(heads: int, dtype: torch.dtype) -> None:
    graph, rows = made()
    x = torch.randint(-4, 5, (NODES, heads, 6)).to(dtype).requires_grad_()
    weights = torch.randint(-2, 3, (rows.numel(), heads)).to(dtype).requires_grad_()
    there = [t.detach().cuda().requires_grad_() for t in (x, weights)]

    here = aggregate(x, weights, graph)
    found = aggregate(there[0], there[1], Graph(*(t.cuda() for t in graph)))

    assert torch.equal(found.cpu(), here)
    for a, b in zip(
        torch.autograd.grad(found.sum(), there), torch.autograd.grad(here.sum(), (x, weights)), strict=True
    ):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("wanted", ["x", "weights"])
def test_a_second_derivative_is_refused(wanted: str) -> None:
    """Aggregation is linear in each: the incoming gradient is a constant, and the derivative by the other is not 0."""
    graph, rows = made()
    x = torch.randn(NODES, 2, 5, requires_grad=True)
    weights = torch.randn(rows.numel(), 2, requires_grad=True)

    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(aggregate(x, weights, graph).sum(), {"x": x, "weights": weights}[wanted], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(softmax_over_edges(weights, rows, NODES).square().sum(), weights, create_graph=True)
