from __future__ import annotations

import pytest

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.model.records import Case
from actbench.tools.gnn.settings import ARXIV_PAIRS, GraphWorkload
from actbench.workload.names import ModelName, is_own, parse_model_name


def load(model: str, **options: object) -> GraphWorkload:
    workload = workloads.load_workload(Case.model_validate({"model": model, "batch_size": 1, **options}))
    assert isinstance(workload, GraphWorkload)
    return workload


def parameters(model: str) -> int:
    return sum(value.numel() for value in load(model).setup(materialize=False, seed=0).module.parameters())


def test_networks_are_named_with_their_changes() -> None:
    assert parse_model_name("gcn@hidden_size=64,dropout=0.0") == ModelName(
        "plugin", "gcn", {"hidden_size": 64, "dropout": 0.0}
    )
    assert is_own("gat@num_heads=2")
    assert not is_own("file.py:build")
    assert {entry.spec for entry in workloads.available() if entry.task == "node-classification"} == {
        "gat",
        "gcn",
        "graphsage",
    }


def test_sizes_are_the_published_ones() -> None:
    assert parameters("gcn") == 110_120  # OGB's leaderboard
    assert parameters("graphsage") == 218_664
    # DGL's figure is of features with the labels beside them and of heads that do not score the node itself.
    assert parameters("gat@num_features=168") == 1_441_580 + 2 * 3 * 250 + 40


def test_the_graph_is_of_the_size_of_ogbn_arxiv() -> None:
    settings = load("gcn").settings

    assert (settings.num_nodes, 2 * settings.num_edges, settings.training_nodes) == (169_343, 2_315_598, 90_941)
    assert settings.num_edges == ARXIV_PAIRS
    assert settings.sizes == (128, 256, 256, 40)


def test_depth_and_width_are_changed() -> None:
    assert load("gcn@num_layers=5,hidden_size=32").settings.sizes == (128, 32, 32, 32, 32, 40)
    assert parameters("gcn@num_layers=1") == parameters("gat@num_layers=1") - 128 * 40 - 2 * 40 == 128 * 40 + 40
    heads = load("gat@num_heads=2,hidden_size=8,num_layers=2").setup(materialize=True, seed=0).module
    assert [tuple(value.shape) for value in heads.parameters() if value.dim() == 2][:2] == [(2, 8), (2, 8)]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gcn@hiden_size=8", "no key 'hiden_size'; did you mean hidden_size"),
        ("gcn@num_heads=2", "no key 'num_heads'.*The keys are hidden_size"),
        ("gcn@hidden_size=0", "hidden_size=0 must be greater than 0"),
        ("gcn@hidden_size=wide", "hidden_size=wide must be a valid integer"),
        ("gcn@num_layers=2.5", "num_layers=2.5 must be a valid integer"),
        ("gcn@num_layers=true", "num_layers=True must be a valid integer"),
        ("gat@dropout=1", "dropout=1 must be less than 1"),
        ("gcn@num_nodes=1", "num_nodes=1 must be greater than 1"),
        ("gcn@num_nodes=10", "10 nodes have 45 pairs, and num_edges is 1157799; give num_edges=45 or less"),
        ("gcnn", "did you mean gcn"),
    ],
)
def test_a_wrong_change_says_what_is_wrong(model: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(model)


def test_other_tasks_and_published_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="--task causal-lm: gcn is a graph network and does node-classification"):
        load("gcn", task="causal-lm")
    with pytest.raises(ModelError, match=r"no pretrained weights for gcn.*--weights random"):
        load("gcn", weights="pretrained")
    with pytest.raises(ModelError, match="--task node-classification: gpt2 is a model of transformers and does"):
        workloads.load_workload(Case(model="gpt2", batch_size=1, task="node-classification"))
