from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from actbench import workload as workloads
from actbench.errors import UsageError
from actbench.measuring.bench import Session
from actbench.model.records import Case, Optimizer
from actbench.workload.optimizers import make_optimizer


@pytest.mark.parametrize(
    ("name", "kind", "states"),
    [
        ("adamw", "AdamW", 3),
        ("adam", "Adam", 3),
        ("sgd", "SGD", 0),
        ("sgd-momentum", "SGD", 1),
        ("sgd-nesterov", "SGD", 1),
        ("adamw-fused", "AdamW", 3),
        ("adamw-loop", "AdamW", 3),
        ("adafactor", "Adafactor", 3),
    ],
)
def test_the_optimizer_has_its_kind_and_state_and_leaves_frozen_weights(
    name: Optimizer, kind: str, states: int
) -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    model.weight.sum().backward()

    optimizer = make_optimizer(name)(model)
    before = model.weight.detach().clone()
    optimizer.step()

    assert type(optimizer).__name__ == kind
    assert [id(value) for group in optimizer.param_groups for value in group["params"]] == [id(model.weight)]
    assert not before.equal(model.weight)
    # Adam keeps a step counter and two moments, SGD with momentum one buffer, plain SGD nothing but None.
    assert sum(value is not None for value in optimizer.state[model.weight].values()) == states


@pytest.mark.parametrize(
    "name",
    [
        "adafactor",
        "muon",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw-fused", "adamw-loop", "sgd-nesterov")),
    ],
)
def test_the_simulation_knows_state_and_peak(name: Optimizer) -> None:
    case = Case(model="tiny-roberta", batch_size=2, sequence_length=8, optimizer=name, device_profile="cpu")
    simulated, cpu = (Session(case.model_copy(update={"meter": meter})).memory() for meter in ("simulated", "cpu"))

    assert simulated.optimizer_bytes == cpu.optimizer_bytes
    assert simulated.peak_bytes == pytest.approx(cpu.peak_bytes, rel=0.005)


@pytest.mark.slow
def test_a_fused_step_needs_no_memory_of_its_own_on_cuda() -> None:
    case = Case(model="tiny-roberta", batch_size=1, sequence_length=4, device_profile="cuda-16gib", torch_era="2.14")
    fused, foreach, loop = (
        Session(case.model_copy(update={"optimizer": name})).memory() for name in ("adamw-fused", "adamw", "adamw-loop")
    )

    assert foreach.peak_bytes - fused.peak_bytes > 0.5 * fused.weights_bytes
    largest = 4 * 50265 * 64  # the embedding of tokens
    assert 0 < loop.peak_bytes - fused.peak_bytes <= 2 * largest
    assert loop.optimizer_bytes == foreach.optimizer_bytes


def test_muon_steps_hidden_matrices_and_adamw_the_rest() -> None:
    model = workloads.load_workload(Case(model="tiny-llama", batch_size=1)).setup(materialize=True, seed=0).module
    optimizer = make_optimizer("muon")(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    kept = {name: set(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    assert kept["model.embed_tokens.weight"] == kept["model.norm.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    assert kept["model.layers.0.mlp.up_proj.weight"] == {"momentum_buffer"}
    assert kept.get("lm_head.weight", {"step"}) != {"momentum_buffer"}

    again = make_optimizer("muon")(model)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(model.state_dict())
    again.step()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "proj" in name)
    assert all(state["step"] == 2 for state in again.state.values() if "step" in state)


def test_muon_without_a_hidden_matrix_is_refused() -> None:
    with pytest.raises(UsageError, match="take adamw"):
        make_optimizer("muon")(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(2, 2)))
