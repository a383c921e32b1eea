"""Copies of the weights: float32 master weights with main gradients, and a moving average."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.measuring.bench import measure
from actbench.methods.weightcopies.optimizers import AveragingOptimizer, MasterOptimizer
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup, TrainStep

PARAMETERS = 196_928  # of tiny-llama


def measured(scheme: str, **fields: Any) -> Measurement:
    case = {"model": "tiny-llama", "batch_size": 2, "sequence_length": 16, "meter": "cpu", "gradient_quality": False}
    return measure(Case.model_validate({**case, "scheme": scheme, **fields}))


def layer(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4).to(dtype)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.linspace(-1, 1, 24).view(3, 8).to(next(model.parameters()).dtype)
    (scale * model(x).float().square().sum()).backward()


@pytest.mark.parametrize("scheme", ["master", "master,main_gradients=false", "ema"])
def test_the_simulation_knows_the_bytes(scheme: str) -> None:
    real, simulated = measured(scheme), measured(scheme, meter="simulated", device_profile="cpu")

    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activation_bytes"):
        assert getattr(simulated, name) == getattr(real, name), name
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-4)


def test_bytes_are_eighteen_a_parameter_with_main_gradients() -> None:
    exact, pure, master = (measured(scheme) for scheme in ("exact", "pure", "master"))
    of_adam = exact.optimizer_bytes - 8 * PARAMETERS  # counters of steps

    assert exact.gradients_bytes == 4 * PARAMETERS
    assert (master.weights_bytes, master.activation_bytes) == (pure.weights_bytes, pure.activation_bytes)
    assert master.gradients_bytes == 4 * PARAMETERS
    assert master.optimizer_bytes == (4 + 8) * PARAMETERS + of_adam
    assert measured("master,main_gradients=false").gradients_bytes == 2 * PARAMETERS


def test_a_moving_average_takes_the_bytes_of_the_weights_from_step_to_step() -> None:
    exact, ema = measured("exact"), measured("ema")

    assert ema.optimizer_bytes == exact.optimizer_bytes + 4 * PARAMETERS
    assert ema.peak_bytes - exact.peak_bytes == 4 * PARAMETERS
    assert ema.loss == exact.loss


@pytest.mark.parametrize("main_gradients", [True, False])
def test_small_updates_are_kept_by_the_master_weights(main_gradients: bool) -> None:
    model = layer()
    before = model.weight.detach().clone()
    plain = nn.Parameter(before.float().clone())
    optimizer = MasterOptimizer(torch.optim.SGD(model.parameters(), lr=1e-5), main_gradients=main_gradients)

    for step in range(40):
        backward(model)
        gradient = optimizer.gradients()[model.weight].float()
        with torch.no_grad():
            plain.sub_(1e-5 * gradient)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            assert model.weight.equal(before)  # a step that bfloat16 rounds away

    assert model.weight.dtype == torch.bfloat16
    torch.testing.assert_close(optimizer.copies[model.weight], plain.detach(), rtol=0, atol=1e-7)
    assert model.weight.equal(plain.detach().bfloat16())


def test_main_gradients_add_up_in_float32_and_take_those_of_the_weights_away() -> None:
    model, alone = layer(), layer()
    optimizer = MasterOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), main_gradients=True)
    first, *_ = optimizer.gradient_parts()
    for scale in (1.0, 1e-3):
        backward(model, scale)
    backward(alone)
    large = alone.weight.grad.float()
    alone.weight.grad = None
    backward(alone, 1e-3)

    assert model.weight.grad is None
    assert optimizer.gradients()[model.weight].equal(large + alone.weight.grad.float())
    optimizer.zero_grad()
    assert next(iter(optimizer.gradient_parts())) is first
    assert not first.any()


def test_only_the_last_optimizer_gets_main_gradients() -> None:
    plain = TrainingSetup(
        layer(torch.float32),
        lambda model, batch: model(batch["x"]).float().sum(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    setup = schemes.build("master").apply(plain)
    batch = {"x": torch.ones(2, 8)}
    earlier, later = TrainStep(setup, batch), TrainStep(setup, batch)

    later.backward(later.forward())

    assert not list(earlier.optimizer.gradient_parts())  # type: ignore[attr-defined]
    assert all(each.any() for each in later.gradients().values())


def test_the_average_follows_the_weights_by_its_decay() -> None:
    model = layer(torch.float32)
    optimizer = AveragingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), decay=0.75)
    average = model.weight.detach().clone()
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        average = 0.75 * average + 0.25 * model.weight.detach()

    torch.testing.assert_close(optimizer.copies[model.weight], average)


@pytest.mark.parametrize("kind", ["master", "ema"])
def test_a_loaded_state_goes_on_alike(kind: str) -> None:
    def made(model: nn.Module) -> Any:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return MasterOptimizer(adam, main_gradients=True) if kind == "master" else AveragingOptimizer(adam, 0.9)

    model, again = layer(), layer()
    optimizer, other = made(model), made(again)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (again, other)):
        backward(each)
        its.step()

    assert all(a.equal(b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert all(a.equal(b) for a, b in zip(optimizer.copies.values(), other.copies.values(), strict=True))


def test_what_steps_parameters_itself_is_refused() -> None:
    with pytest.raises(SpecError, match="both say which parameters are stepped together"):
        schemes.build("ema+release")
    with pytest.raises(ConversionError, match="not kept beside MasterOptimizer, which holds or steps gradients itself"):
        measured("master+ema")
    model = layer()
    backward(model)
    stepped = torch.optim.AdamW(model.parameters())
    stepped.step()
    with pytest.raises(ConversionError, match="AdamW has stepped already"):
        AveragingOptimizer(stepped, 0.9)
