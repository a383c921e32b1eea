from __future__ import annotations

import pytest
import torch

from actbench.simulator.fake import fake_mode
from actbench.tools.gnn import generated
from actbench.tools.gnn.aggregation import Graph


def drawn(nodes: int, edges: int, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return generated.citations(nodes, edges, classes, torch.Generator().manual_seed(seed))


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
    graph, rows = generated.adjacency(citing, cited, 40, self_loops=self_loops)

    matrix = torch.zeros(40, 40)
    matrix[citing, cited] = matrix[cited, citing] = 1
    matrix += torch.eye(40) * self_loops
    assert torch.equal(torch.stack((rows, graph.columns)), matrix.nonzero().T)
    assert torch.equal(graph.row_pointers.diff(), matrix.sum(1).long())
    assert torch.equal(rows[graph.reverse], graph.columns)
    assert torch.equal(graph.columns[graph.reverse], rows)


def test_copies_stand_side_by_side() -> None:
    graph, rows = generated.adjacency(*drawn(10, 20), 10, self_loops=True)
    one, edges = torch.zeros(10, 10), 50
    one[rows, graph.columns] = 1

    three = generated.side_by_side(graph, 3)

    matrix = torch.zeros(30, 30)
    matrix[generated.repeated(rows, 3, 10), three.columns] = 1
    assert torch.equal(matrix, torch.block_diag(one, one, one))
    assert three.row_pointers[[0, 10, 20, 30]].tolist() == [0, edges, 2 * edges, 3 * edges]
    assert torch.equal(three.columns[three.reverse], generated.repeated(rows, 3, 10))


def test_weights_are_those_of_the_normalised_matrices() -> None:
    graph, rows = generated.adjacency(*drawn(10, 20), 10, self_loops=True)
    one = torch.zeros(10, 10)
    one[rows, graph.columns] = 1
    degree = one.sum(1)

    symmetric = generated.symmetric_weights(graph, rows)[:, 0]
    mean = generated.mean_weights(graph, rows)[:, 0]

    torch.testing.assert_close(symmetric, (one / degree.outer(degree).sqrt())[rows, graph.columns])
    torch.testing.assert_close(mean, (one / degree[:, None])[rows, graph.columns])


def test_features_tell_the_classes_apart() -> None:
    labels = torch.arange(2000) % 4
    features = generated.features(labels, 128, 4, torch.Generator().manual_seed(0))
    means = torch.stack([features[labels == label].mean(0) for label in range(4)])

    nearest = torch.cdist(features, means).argmin(1)

    assert 0.8 < (nearest == labels).float().mean() < 1


def test_shapes_of_fake_tensors_are_those_of_real_ones() -> None:
    real, rows = generated.adjacency(*drawn(20, 60), 20, self_loops=True)
    with fake_mode():
        fake, fake_rows = generated.adjacency(*drawn(20, 60), 20, self_loops=True)
        fake = generated.side_by_side(fake, 2)
    real = generated.side_by_side(real, 2)

    for name in Graph._fields:
        assert getattr(fake, name).shape == getattr(real, name).shape
        assert getattr(fake, name).dtype == getattr(real, name).dtype == torch.int64
    assert fake_rows.shape == rows.shape
