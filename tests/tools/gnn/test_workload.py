from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actbench import convert, workload as workloads
from actbench.errors import ModelError
from actbench.measuring import bench
from actbench.model.records import Case
from actbench.tools.convert.folders import load_converted, save_converted
from actbench.tools.gnn.settings import _loss

NODES, PAIRS, FEATURES, CLASSES, HIDDEN = 240, 900, 16, 4, 32
SMALL = f"@num_nodes={NODES},num_edges={PAIRS},num_features={FEATURES},num_classes={CLASSES},hidden_size={HIDDEN}"
names = pytest.mark.parametrize("name", ["gat", "gcn", "graphsage"])


def case(name: str, **options: Any) -> Case:
    return Case.model_validate({"model": name + SMALL, "batch_size": 1, **options})


@names
def test_a_batch_is_so_many_graphs(name: str) -> None:
    workload = workloads.load_workload(case(name))
    batch = workload.batch(3, seed=0)
    edges = 2 * PAIRS + (0 if name == "graphsage" else NODES)

    assert batch["features"].shape == (3 * NODES, FEATURES)
    assert batch["row_pointers"].shape == (3 * NODES + 1,)
    assert batch["columns"].shape == batch["reverse"].shape == batch["edges"].shape[:1] == (3 * edges,)
    assert batch["training_nodes"].shape == batch["labels"].shape == (3 * (NODES * 90_941 // 169_343),)
    assert torch.equal(batch["labels"], batch["training_nodes"] % NODES % CLASSES)
    assert not torch.equal(batch["features"][:NODES], batch["features"][NODES : 2 * NODES])
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
        losses.append(_loss(module, one))

    torch.testing.assert_close(_loss(module, both), torch.stack(losses).mean())


@names
def test_every_parameter_is_trained_and_the_loss_falls(name: str) -> None:
    workload = workloads.load_workload(case(name))
    setup = workload.setup(materialize=True, seed=0)
    batch = workload.batch(1, seed=0)
    optimizer = torch.optim.Adam(setup.module.parameters(), lr=0.01)
    torch.manual_seed(0)
    before = _loss(setup.module.eval(), batch).item()
    setup.module.train()
    for _ in range(20):
        loss = setup.forward(batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in setup.module.parameters())
        optimizer.step()
        optimizer.zero_grad()

    assert _loss(setup.module.eval(), batch).item() < 0.7 * before


@pytest.mark.sampled(fast=2, slow=2)
@names
@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_the_meters_measure_it(name: str, meter: str) -> None:
    measured = bench.measure(case(name, meter=meter, warmup_steps=0, min_steps=1, min_seconds=0))

    assert measured.peak_bytes > measured.activation_bytes > 2 * 3 * 4 * NODES * HIDDEN
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
    measured = bench.measure(Case(model="gcn", batch_size=1, meter="simulated"))

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

    back = load_converted(save_converted(model, tmp_path / "model", built_from=case(name)))

    assert torch.equal(_loss(back, batch), _loss(model, batch))


@pytest.mark.parametrize("spec", ["own.py:build", "resnet18", "gcn@num_layers"])
def test_a_folder_builds_no_other_thing(spec: str, tmp_path: Path) -> None:
    model = convert(
        workloads.load_workload(case("gcn")).setup(materialize=True, seed=0).module, "checkpoint,blocks=GraphBlock"
    )
    folder = save_converted(model, tmp_path / "model", built_from=spec)

    with pytest.raises(ModelError, match=r"is not built from a folder|not a new key=value"):
        load_converted(folder)
