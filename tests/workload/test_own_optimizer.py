"""An optimizer that comes with a model of the user's own."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch import optim

from actbench import workload as workloads
from actbench.errors import ModelError, UsageError
from actbench.measuring.bench import Session
from actbench.measuring.failures import failure_of
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.setup import TrainStep

TEXT = """
    import torch
    from torch import nn, optim

    def parts():
        model = nn.Sequential(nn.Linear(160, 160), nn.GELU(), nn.Linear(160, 8))
        make_batch = lambda n: {{"x": torch.randn(n, 160)}}
        return model, make_batch, lambda model, batch: model(batch["x"]).square().mean()

    def build():
        model, make_batch, loss = parts()
        model[0].bias.requires_grad_(False)
        return model, make_batch, loss, {optimizer}
"""
WEIGHTS = 160 * 160 + 160 + 160 * 8 + 8


def own(folder: Path, optimizer: str) -> str:
    file = folder / "own.py"
    file.write_text(textwrap.dedent(TEXT).format(optimizer=optimizer))
    return f"{file}:build"


def measured(folder: Path, brought: str, **settings: object) -> Measurement:
    return Session(Case(model=own(folder, brought), batch_size=4, gradient_quality=False, **settings)).memory()  # type: ignore[arg-type]


@pytest.mark.parametrize("meter", ["simulated", "cpu"])
@pytest.mark.parametrize(
    ("optimizer", "name", "elements"),
    [
        ("optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "SGD", WEIGHTS - 160),
        ("optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)", "SGD", 160 * 8 + 8),
        ("lambda model: optim.RMSprop(model.parameters(), momentum=0.9)", "RMSprop", 2 * (WEIGHTS - 160)),
        ("optim.Adagrad(model.parameters())", "Adagrad", WEIGHTS),
    ],
)
def test_it_is_the_one_that_trains(tmp_path: Path, meter: str, optimizer: str, name: str, elements: int) -> None:
    found = measured(tmp_path, optimizer, meter=meter, device_profile="cpu", scheme="fewbit:3")

    assert found.optimizer == name
    assert found.optimizer_bytes is not None
    assert elements * 4 <= found.optimizer_bytes <= elements * 4 + 64  # counters of steps


def test_the_one_that_is_asked_for_goes_before(tmp_path: Path) -> None:
    found = measured(tmp_path, "optim.SGD(model.parameters(), lr=0.1)", optimizer="adam")

    assert found.optimizer == "Adam"
    assert found.optimizer_bytes is not None
    assert found.optimizer_bytes >= 8 * (WEIGHTS - 160)


@pytest.mark.parametrize(
    "optimizer", ["optim.SGD(model.parameters(), lr=0.5, momentum=0.9)", "optim.Adagrad(model.parameters())"]
)
def test_each_step_begins_with_the_state_that_it_came_with(tmp_path: Path, optimizer: str) -> None:
    workload = workloads.load_workload(Case(model=own(tmp_path, optimizer), batch_size=4))
    setup = workload.setup(materialize=True, seed=0)
    begun = {name: tensor.clone() for name, tensor in setup.module.state_dict().items()}
    batch = workload.batch(4, seed=1)

    def trained() -> list[torch.Tensor]:
        setup.module.load_state_dict(begun)
        step = TrainStep(setup, batch)
        for _ in range(3):
            step()
        return [parameter.detach().clone() for parameter in setup.module.parameters()]

    first, second = trained(), trained()

    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], begun["0.weight"])


def test_it_is_packed_by_schemes_that_pack_state(tmp_path: Path) -> None:
    adam = "optim.AdamW(model.parameters(), lr=0.1)"
    exact, packed = (measured(tmp_path, adam, scheme=scheme) for scheme in ("exact", "smaq,on=state"))

    assert exact.optimizer_bytes is not None
    assert packed.optimizer_bytes is not None
    assert 3 * packed.optimizer_bytes < exact.optimizer_bytes


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            "optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)",
            r"holds 1 of 1 parameters that are not of the model.*\(3,\)",
        ),
        ("optim.SGD(parts()[0].parameters(), lr=1.0)", r"holds 4 of 4 parameters that are not of the model"),
        ("lambda model: optim.SGD(parts()[0].parameters(), lr=1.0)", r"holds 4 of 4 parameters"),
        ("lambda model: model", "returned Sequential; it must return a torch.optim.Optimizer"),
        ("optim.SGD", r"own\.py: TypeError"),
        ("'adamw'", r"returned \(Sequential, function, function, str\); a function that builds a model must return"),
    ],
)
@pytest.mark.parametrize("meter", ["simulated", "cpu"])
def test_a_wrong_one_is_refused_in_words(tmp_path: Path, optimizer: str, words: str, meter: str) -> None:
    with pytest.raises(ModelError, match=words):
        measured(tmp_path, optimizer, meter=meter)


@pytest.mark.parametrize(
    "optimizer", ["optim.LBFGS(model.parameters())", "lambda model: optim.LBFGS(model.parameters())"]
)
def test_one_that_needs_a_closure_is_refused(tmp_path: Path, optimizer: str) -> None:
    with pytest.raises(UsageError, match=r"LBFGS needs a closure .*; take .*AdamW") as refused:
        measured(tmp_path, optimizer)

    assert failure_of(refused.value).reason == "unsupported"


@pytest.mark.parametrize("optimizer", ["None", "optim.SGD(model.requires_grad_(False).parameters(), lr=1.0)"])
def test_a_frozen_model_is_refused_in_words(tmp_path: Path, optimizer: str) -> None:
    case = own(tmp_path, optimizer)
    file = tmp_path / "own.py"
    file.write_text(file.read_text().replace("model[0].bias", "model"))

    with pytest.raises(
        ModelError, match=r"Sequential has no parameter that needs a gradient.*requires_grad_"
    ) as refused:
        Session(Case(model=case, batch_size=4, gradient_quality=False)).memory()

    assert failure_of(refused.value).reason == "unsupported"


def test_the_instance_is_the_very_one(tmp_path: Path) -> None:
    case = Case(model=own(tmp_path, "optim.SGD(model.parameters(), lr=0.25)"), batch_size=4)
    for materialize in (True, False):
        setup = workloads.load_workload(case).setup(materialize=materialize, seed=0)
        assert setup.make_optimizer is not None
        made = setup.make_optimizer(setup.module)
        held = [parameter for group in made.param_groups for parameter in group["params"]]

        assert isinstance(made, optim.SGD)
        assert made.param_groups[0]["lr"] == 0.25
        assert all(a is b for a, b in zip(held, setup.module.parameters(), strict=True))
