from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from graphs import Graph, adjacency, aggregate, citations, softmax_over_edges
from torch import Tensor

from actbench import convert, workload as workloads
from actbench.errors import UsageError
from actbench.measuring import bench
from actbench.model.declared import check_model
from actbench.model.records import Case
from actbench.run import recipes
from actbench.simulator.fake import fake_mode
from actbench.tools.convert.folders import load_converted, save_converted

EXAMPLES = Path(graphs.__file__).parent
NODES, PAIRS = 12, 25
SMALL = Path(__file__).with_name("smallgraphs.py")
NODES_OF_SMALL, PAIRS_OF_SMALL, FEATURES, CLASSES, HIDDEN = 240, 900, 16, 4, 32


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
    whole = torch.ops.graphs.edge_dot(*arguments)

    monkeypatch.setattr(graphs, "CHUNK_ELEMENTS", 4 * 2 * 3)

    assert graph.columns.numel() % 4
    assert torch.equal(torch.ops.graphs.edge_dot(*arguments), whole)


def test_the_operators_are_as_torch_wants_them() -> None:
    graph, rows = made()
    left, right = torch.randn(2, NODES, 2, 3)
    weights = torch.randn(rows.numel(), 2)

    torch.library.opcheck(torch.ops.graphs.edge_sum.default, (graph.row_pointers, graph.columns, weights, left))
    torch.library.opcheck(torch.ops.graphs.edge_dot.default, (graph.row_pointers, graph.columns, left, right))


def test_features_of_other_nodes_are_refused() -> None:
    graph, rows = made()

    with pytest.raises(ValueError, match=f"{NODES} nodes, found \\(11, 1, 3\\)"):
        aggregate(torch.randn(11, 1, 3), torch.ones(rows.numel(), 1), graph)


@pytest.mark.exhaustive
def test_torch_does_not_warn_of_its_sparse_matrices() -> None:
    code = (
        "import torch\nfrom graphs import Graph, aggregate\n"
        "graph = Graph(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([1, 0]))\n"
        "print(aggregate(torch.tensor([[[1.0]], [[2.0]]]), torch.ones(2, 1), graph).flatten().tolist())"
    )

    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=EXAMPLES)

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


def drawn(nodes: int, edges: int, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return graphs.citations(nodes, edges, classes, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [(2, 1), (3, 1), (3, 3), (7, 20), (7, 21), (20, 60), (21, 190), (50, 3), (300, 2000), (300, 44_000)],
)
@pytest.mark.parametrize("seed", range(3))
def test_each_pair_is_drawn_once_and_cites_an_earlier_node(nodes: int, edges: int, seed: int) -> None:
    citing, cited = drawn(nodes, edges, seed=seed)

    assert citing.shape == cited.shape == (edges,)
    assert bool(((cited >= 0) & (cited < citing) & (citing < nodes)).all())
    assert torch.unique(citing * nodes + cited).numel() == edges


def test_a_graph_of_all_pairs_is_complete() -> None:
    citing, cited = drawn(30, 435)

    assert torch.equal(torch.stack((citing, cited)), torch.tril_indices(30, 30, -1))


def test_the_seed_decides_the_graph() -> None:
    first, again, other = (torch.stack(drawn(100, 500, seed=seed)) for seed in (1, 1, 2))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_degrees_have_a_heavy_tail_and_edges_keep_to_their_class() -> None:
    nodes, edges, classes = 169_343, 1_157_799, 40
    citing, cited = drawn(nodes, edges, classes)
    degrees = torch.bincount(torch.cat((citing, cited)), minlength=nodes)
    alike = (citing % classes == cited % classes).float().mean().item()

    assert 0.8 * 13_161 < degrees.max() < 1.2 * 13_161  # the largest of ogbn-arxiv
    # Of a power law of exponent 2.5, ten times the degree is had by 10 ** 1.5 = 32 times fewer nodes.
    assert 25 < (degrees > 100).sum() / (degrees > 1000).sum() < 40
    assert abs(alike - 0.655) < 0.01


@pytest.mark.parametrize("self_loops", [False, True])
def test_the_adjacency_has_each_edge_in_both_directions(self_loops: bool) -> None:
    citing, cited = drawn(40, 100)
    graph, rows = graphs.adjacency(citing, cited, 40, self_loops=self_loops)

    matrix = torch.zeros(40, 40)
    matrix[citing, cited] = matrix[cited, citing] = 1
    matrix += torch.eye(40) * self_loops
    assert torch.equal(torch.stack((rows, graph.columns)), matrix.nonzero().T)
    assert torch.equal(graph.row_pointers.diff(), matrix.sum(1).long())
    assert torch.equal(rows[graph.reverse], graph.columns)
    assert torch.equal(graph.columns[graph.reverse], rows)


def test_copies_stand_side_by_side() -> None:
    graph, rows = graphs.adjacency(*drawn(10, 20), 10, self_loops=True)
    one, edges = torch.zeros(10, 10), 50
    one[rows, graph.columns] = 1

    three = graphs.side_by_side(graph, 3)

    matrix = torch.zeros(30, 30)
    matrix[graphs.repeated(rows, 3, 10), three.columns] = 1
    assert torch.equal(matrix, torch.block_diag(one, one, one))
    assert three.row_pointers[[0, 10, 20, 30]].tolist() == [0, edges, 2 * edges, 3 * edges]
    assert torch.equal(three.columns[three.reverse], graphs.repeated(rows, 3, 10))


def test_weights_are_those_of_the_normalised_matrices() -> None:
    graph, rows = graphs.adjacency(*drawn(10, 20), 10, self_loops=True)
    one = torch.zeros(10, 10)
    one[rows, graph.columns] = 1
    degree = one.sum(1)

    symmetric = graphs.symmetric_weights(graph, rows)[:, 0]
    mean = graphs.mean_weights(graph, rows)[:, 0]

    torch.testing.assert_close(symmetric, (one / degree.outer(degree).sqrt())[rows, graph.columns])
    torch.testing.assert_close(mean, (one / degree[:, None])[rows, graph.columns])


def test_features_tell_the_classes_apart() -> None:
    labels = torch.arange(2000) % 4
    features = graphs.features(labels, 128, 4, torch.Generator().manual_seed(0))
    means = torch.stack([features[labels == label].mean(0) for label in range(4)])

    nearest = torch.cdist(features, means).argmin(1)

    assert 0.8 < (nearest == labels).float().mean() < 1


def test_shapes_of_fake_tensors_are_those_of_real_ones() -> None:
    real, rows = graphs.adjacency(*drawn(20, 60), 20, self_loops=True)
    with fake_mode():
        fake, fake_rows = graphs.adjacency(*drawn(20, 60), 20, self_loops=True)
        fake = graphs.side_by_side(fake, 2)
    real = graphs.side_by_side(real, 2)

    for name in Graph._fields:
        assert getattr(fake, name).shape == getattr(real, name).shape
        assert getattr(fake, name).dtype == getattr(real, name).dtype == torch.int64
    assert fake_rows.shape == rows.shape


names = pytest.mark.parametrize("name", ["gat", "gcn", "graphsage"])


def model(name: str) -> str:
    """Return the specification of a small network."""
    return f"{SMALL}:{name}"


def case(name: str, **options: Any) -> Case:
    return Case.model_validate({"model": model(name), "batch_size": 1, **options})


@names
def test_a_batch_is_so_many_graphs(name: str) -> None:
    workload = workloads.load_workload(case(name))
    batch = workload.batch(3, seed=0)
    edges = 2 * PAIRS_OF_SMALL + (0 if name == "graphsage" else NODES_OF_SMALL)

    assert batch["features"].shape == (3 * NODES_OF_SMALL, FEATURES)
    assert batch["row_pointers"].shape == (3 * NODES_OF_SMALL + 1,)
    assert batch["columns"].shape == batch["reverse"].shape == batch["edges"].shape[:1] == (3 * edges,)
    assert batch["training"].shape == batch["labels"].shape == (3 * (NODES_OF_SMALL * 90_941 // 169_343),)
    assert torch.equal(batch["labels"], batch["training"] % NODES_OF_SMALL % CLASSES)
    assert not torch.equal(batch["features"][:NODES_OF_SMALL], batch["features"][NODES_OF_SMALL : 2 * NODES_OF_SMALL])
    again = workload.batch(3, seed=0)
    assert all(torch.equal(batch[key], again[key]) for key in batch)


@names
def test_the_loss_of_two_graphs_is_the_mean_of_theirs(name: str) -> None:
    workload = workloads.load_workload(case(name))
    module = workload.setup(materialize=True, seed=0).module.eval()
    both, one = workload.batch(2, seed=0), dict(workload.batch(1, seed=0))
    losses = []
    for half in both["features"].chunk(2):
        one["features"] = half
        losses.append(graphs.loss(module, one))

    torch.testing.assert_close(graphs.loss(module, both), torch.stack(losses).mean())


@names
def test_every_parameter_is_trained_and_the_loss_falls(name: str) -> None:
    workload = workloads.load_workload(case(name))
    setup = workload.setup(materialize=True, seed=0)
    batch = workload.batch(1, seed=0)
    optimizer = torch.optim.Adam(setup.module.parameters(), lr=0.01)
    torch.manual_seed(0)
    before = graphs.loss(setup.module.eval(), batch).item()
    setup.module.train()
    for _ in range(20):
        loss = setup.forward(batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in setup.module.parameters())
        optimizer.step()
        optimizer.zero_grad()

    assert graphs.loss(setup.module.eval(), batch).item() < 0.7 * before


@pytest.mark.sampled(fast=2, slow=2)
@names
@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_the_meters_measure_it(name: str, meter: str) -> None:
    measured = bench.measure(case(name, meter=meter, warmup_steps=0, min_steps=1, min_seconds=0))

    assert measured.peak_bytes > measured.activation_bytes > 2 * 3 * 4 * NODES_OF_SMALL * HIDDEN
    assert (measured.loss is None) == (meter == "simulated")


@names
@pytest.mark.parametrize(
    "options", [pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow), {"autocast": "bfloat16"}], ids=str
)
def test_half_types_train(name: str, options: dict[str, str]) -> None:
    losses = []
    for chosen in (options, {}):
        workload = workloads.load_workload(case(name, **chosen))
        setup = workload.setup(materialize=True, seed=0)
        torch.manual_seed(0)
        losses.append(setup.forward(workload.batch(1, seed=0)))
    losses[0].backward()

    assert abs(losses[0].item() / losses[1].item() - 1) < 0.05


def rounded(count: int) -> int:
    return -(-count // 512) * 512


def test_a_gcn_of_full_size_keeps_what_its_layers_keep() -> None:
    nodes, hidden, trained, classes = 169_343, 256, 90_941, 40
    measured = bench.measure(Case(model=f"{graphs.__file__}:gcn", batch_size=1, meter="simulated"))

    # Kept by each of two hidden layers: the inputs of batch norm, of ReLU's and of dropout's backward and of the next
    # product, in which ReLU's result stands for its input, and dropout's mask of a byte an element; the statistics.
    layer = 3 * rounded(4 * nodes * hidden) + rounded(nodes * hidden) + 2 * rounded(4 * hidden)
    scores = rounded(4 * trained * classes)
    scalars = 2 * 512  # the loss and the weight of its samples
    assert measured.activation_bytes == 2 * layer + scores + scalars


@pytest.mark.exhaustive
def test_the_largest_number_of_graphs_is_found() -> None:
    found = bench.measure(case("gcn", meter="simulated", find_largest_batch=True, memory_limit_bytes=40_000_000))

    assert found.largest_batch is not None
    assert found.largest_batch > 1


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["checkpoint,blocks=GraphBlock", "randomized:0.5"])
def test_schemes_work_on_it(scheme: str) -> None:
    options = {"meter": "simulated"}
    exact, saved = (bench.measure(case("gat", scheme=s, **options)) for s in ("exact", scheme))

    assert saved.activation_bytes < exact.activation_bytes
    assert saved.sites


@names
def test_a_converted_network_comes_back(name: str, tmp_path: Path) -> None:
    workload = workloads.load_workload(case(name))
    model = convert(workload.setup(materialize=True, seed=0).module, "checkpoint,blocks=GraphBlock").eval()
    batch = workload.batch(1, seed=0)

    plain = workloads.load_workload(case(name)).setup(materialize=True, seed=1).module
    back = load_converted(save_converted(model, tmp_path / "model"), model=plain)

    assert torch.equal(graphs.loss(back, batch), graphs.loss(model, batch))


def test_sizes_are_the_published_ones() -> None:
    def parameters(built: Any) -> int:
        return sum(value.numel() for value in built[0].parameters())

    assert parameters(graphs.gcn()) == 110_120  # OGB's leaderboard
    assert parameters(graphs.graphsage()) == 218_664
    # DGL's figure is of features with the labels beside them and of heads that do not score the node itself.
    wide = graphs.build(graphs.GAT, hidden_size=250, width=168)
    assert parameters(wide) == 1_441_580 + 2 * 3 * 250 + 40


def test_the_recipe_of_the_examples_names_networks_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    cases = recipes.load("examples/graphs.toml").cases()
    assert {entry.case.scheme for entry in cases} == {"exact", "gact:L2", "gact:L3"}
    for entry in cases:
        check_model(entry.case.model)


def test_graphs_cannot_be_cut_into_micro_batches() -> None:
    with pytest.raises(UsageError, match="cannot be cut"):
        bench.measure(case("gcn", scheme="accumulate:2", batch_size=2))
