"""Copies of the weights: float32 master weights with main gradients, and a moving average."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from allocatedpeaks import allocated_peak
from torch import Tensor, nn

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


def scratch_of_products() -> int:
    """Return the most bytes of oneDNN's own for a bfloat16 product of a gated MLP's 32 rows, as it is on this machine.

    Without instructions for bfloat16 it computes in float32, and copies operands by the way that they lie in memory.
    """

    def scratch(first: Tensor, second: Tensor) -> int:
        return allocated_peak(lambda: first @ second) - first.element_size() * first.shape[0] * second.shape[1]

    rows, width, inner = 32, 64, 256
    shapes = [(rows, width, inner), (rows, inner, width), (inner, rows, width), (width, rows, inner)]
    pairs = [(torch.ones(m, k, dtype=torch.bfloat16), torch.ones(k, n, dtype=torch.bfloat16)) for m, k, n in shapes]
    transposed = [(first.t().contiguous().t(), second) for first, second in pairs]
    return max(scratch(*pair) for pair in (*pairs, *transposed))


def layer(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4).to(dtype)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.linspace(-1, 1, 24).view(3, 8).to(next(model.parameters()).dtype)
    (scale * model(x).float().square().sum()).backward()


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["master", "master,main_gradients=false", "ema", "pure+ema"])
def test_the_simulation_knows_the_bytes(scheme: str) -> None:
    real, simulated = measured(scheme), measured(scheme, meter="simulated", device_profile="cpu")

    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activation_bytes"):
        assert getattr(simulated, name) == getattr(real, name), name
    unknown = scratch_of_products() if simulated.approximate else 0
    assert (1 - 1e-4) * real.peak_bytes - unknown <= simulated.peak_bytes <= (1 + 1e-4) * real.peak_bytes


@pytest.mark.exhaustive
def test_bytes_are_eighteen_a_parameter_with_main_gradients() -> None:
    exact, pure, master = (measured(scheme) for scheme in ("exact", "pure", "master"))
    of_adam = exact.optimizer_bytes - 8 * PARAMETERS  # counters of steps

    assert exact.gradients_bytes == 4 * PARAMETERS
    assert (master.weights_bytes, master.activation_bytes) == (pure.weights_bytes, pure.activation_bytes)
    assert master.gradients_bytes == 4 * PARAMETERS
    assert master.optimizer_bytes == (4 + 8) * PARAMETERS + of_adam
    assert measured("master,main_gradients=false").gradients_bytes == 2 * PARAMETERS


@pytest.mark.slow
def test_a_moving_average_takes_the_bytes_of_the_weights_from_step_to_step() -> None:
    exact, ema = measured("exact"), measured("ema")

    assert ema.optimizer_bytes == exact.optimizer_bytes + 4 * PARAMETERS
    assert ema.peak_bytes - exact.peak_bytes == 4 * PARAMETERS
    assert ema.loss == exact.loss


@pytest.mark.exhaustive
def test_so_does_one_of_weights_of_a_half_type_in_float32() -> None:
    assert measured("pure+ema").optimizer_bytes == measured("pure").optimizer_bytes + 4 * PARAMETERS


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
    setup = converted("master")
    batch = {"x": torch.ones(2, 8)}
    earlier, later = TrainStep(setup, batch), TrainStep(setup, batch)

    later.backward(later.forward())

    assert not list(earlier.optimizer.gradient_parts())  # type: ignore[attr-defined]
    assert all(each.any() for each in later.gradients().values())


def converted(scheme: str) -> TrainingSetup:
    plain = TrainingSetup(
        layer(torch.float32),
        lambda model, batch: model(batch["x"]).float().sum(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    return schemes.build(scheme).apply(plain)


def test_an_optimizer_that_is_gone_takes_no_gradients() -> None:
    setup, batch = converted("master"), {"x": torch.ones(2, 8)}
    earlier = TrainStep(setup, batch)
    earlier()
    before = earlier.setup.module.weight.detach().clone()
    del earlier
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in setup.module.parameters())
    step = TrainStep(setup, batch)
    step()

    assert not setup.module.weight.equal(before)


@pytest.mark.parametrize("main_gradients", [True, False])
def test_parameters_without_a_gradient_are_not_stepped(main_gradients: bool) -> None:
    used, unused = layer(), layer()
    adam = torch.optim.AdamW([*used.parameters(), *unused.parameters()], lr=0.1, weight_decay=0.1)
    optimizer = MasterOptimizer(adam, main_gradients=main_gradients)
    before = unused.weight.detach().clone()
    backward(used)

    assert set(optimizer.gradients()) == set(used.parameters())
    optimizer.step()
    optimizer.zero_grad()
    backward(unused)
    after = used.weight.detach().clone()
    assert unused.weight.equal(before)
    optimizer.step()
    assert not unused.weight.equal(before)
    assert used.weight.equal(after)  # its moments would move it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_average_follows_the_weights_by_its_decay(dtype: torch.dtype) -> None:
    model = layer(dtype)
    optimizer = AveragingOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), decay=0.999)
    before = average = model.weight.detach().float().clone()
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        average = 0.999 * average + 0.001 * model.weight.detach().float()

    torch.testing.assert_close(optimizer.copies[model.weight], average, rtol=0, atol=1e-7)
    assert (average - before).abs().max() > 1e-5


@pytest.mark.parametrize("kind", ["master", "master,main_gradients=false", "ema"])
def test_a_group_that_is_added_later_is_copied_and_stepped(kind: str) -> None:
    setup, added = converted(kind), layer(torch.float32 if kind == "ema" else torch.bfloat16)
    optimizer: Any = setup.make_optimizer(setup.module)  # type: ignore[misc]
    optimizer.add_param_group({"params": added.parameters(), "lr": 0.5})
    before = optimizer.copies[added.weight].clone()
    backward(added)
    gradient = optimizer.gradients()[added.weight].float() if kind != "ema" else added.weight.grad
    optimizer.step()

    moved = before - 0.5 * gradient
    if kind == "ema":
        torch.testing.assert_close(optimizer.copies[added.weight], before.lerp(added.weight.detach(), 1e-3))
        torch.testing.assert_close(added.weight.detach(), moved)
    else:
        torch.testing.assert_close(optimizer.copies[added.weight], moved)
        assert added.weight.equal(optimizer.copies[added.weight].bfloat16())
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.1, 0.5]


@pytest.mark.parametrize("main_gradients", [True, False])
def test_master_weights_refuse_a_gradient_scaler(main_gradients: bool) -> None:
    model, scaler = layer(), torch.amp.GradScaler("cpu")
    optimizer = MasterOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), main_gradients=main_gradients)
    scaler.scale(model(torch.ones(1, 8).bfloat16()).float().sum()).backward()

    with pytest.raises(ConversionError, match="GradScaler does not go with master weights"):
        scaler.step(optimizer)


def test_a_moving_average_goes_with_a_gradient_scaler() -> None:
    def trained(scaled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model, scaler = layer(torch.float32), torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        optimizer = AveragingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), decay=0.75)
        scaler.scale(model(torch.ones(1, 8)).sum()).backward()
        scaler.step(optimizer)
        return model.weight.detach(), optimizer.copies[model.weight]

    assert all(one.equal(other) for one, other in zip(trained(True), trained(False), strict=True))


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
    with pytest.raises(ConversionError, match="do not work with MasterOptimizer, which holds or steps gradients"):
        measured("master+ema")
    model = layer()
    backward(model)
    stepped = torch.optim.AdamW(model.parameters())
    stepped.step()
    with pytest.raises(ConversionError, match="AdamW has stepped already"):
        AveragingOptimizer(stepped, 0.9)
