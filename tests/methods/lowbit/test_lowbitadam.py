"""Adam and AdamW with moments of few bits, by torchao."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, MeasurementError, UsageError
from actbench.measuring.bench import measure
from actbench.measuring.meters import footprint
from actbench.model.records import Case
from actbench.scheme.setup import Batch, MakeOptimizer, TrainingSetup, TrainStep
from actbench.tools.convert import model as conversion


def setup(make: MakeOptimizer, module: nn.Module | None = None) -> TrainingSetup:
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return TrainingSetup(module, loss=_loss, make_optimizer=make)


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    return (module(batch["x"]) - batch["y"]).square().mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3)


def batch() -> Batch:
    random = torch.Generator().manual_seed(1)
    return {"x": torch.randn(32, 64, generator=random), "y": torch.randn(32, 64, generator=random)}


def trained(found: TrainingSetup, steps: int = 60) -> list[float]:
    step = TrainStep(found, batch())
    return [float(step()) for _ in range(steps)]


NAMES = ["adam8bit", "adam4bit", "adamfp8"]


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((torch.optim.AdamW, name) for name in NAMES),
        (torch.optim.Adam, "adam8bit"),
        *(pytest.param(torch.optim.Adam, name, marks=pytest.mark.slow) for name in NAMES[1:]),
    ],
)
def test_it_trains_as_the_exact_optimizer_does(kind: Callable[..., torch.optim.Optimizer], name: str) -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        return kind(module.parameters(), lr=3e-3)

    exact, found = trained(setup(make)), trained(schemes.build(name).apply(setup(make)))

    assert found != exact
    assert found[-1] < 0.05 * found[0]
    assert sum(found) == pytest.approx(sum(exact), rel=0.5 if name == "adam4bit" else 0.1)


@pytest.mark.parametrize(
    ("name", "moment_bytes"),
    [
        ("adam8bit", 8192 + 8192 // 256 * 4 + 256 * 4),
        ("adam4bit", 8192 // 2 + 8192 // 128 * 4 + 16 * 4),
        ("adamfp8", 8192 + 8192 // 256 * 4),
    ],
)
def test_the_state_has_its_bytes(name: str, moment_bytes: int) -> None:
    """Of 8,192 elements: two moments, each of codes, a float32 scale for each group of them, and float32 levels."""
    step = TrainStep(schemes.build(name).apply(setup(adamw)), batch())
    step()

    weights, biases = 2 * (2 * moment_bytes + 4), 2 * 4 * (128 + 64) + 2 * 4
    assert footprint.stored_bytes(footprint.optimizer_state(step.optimizer)) == weights + biases


def test_options_of_groups_are_taken_over() -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        first, *others = module.parameters()
        return torch.optim.AdamW([{"params": [first], "lr": 0.5, "weight_decay": 0.0}, {"params": others}], lr=0.25)

    found = schemes.build("adam8bit").apply(setup(make))
    first, second = found.make_optimizer(found.module).param_groups  # type: ignore[misc]

    assert [float(first["lr"]), first["weight_decay"]] == [0.5, 0.0]
    assert [float(second["lr"]), second["weight_decay"], second["betas"]] == [0.25, 0.01, (0.9, 0.999)]


@pytest.mark.parametrize("name", NAMES)
def test_saved_state_is_of_plain_tensors_and_a_run_goes_on_from_it(name: str) -> None:
    whole = TrainStep(schemes.build(name).apply(setup(adamw)), batch())
    for _ in range(3):
        whole()
    saved, weights = copy.deepcopy(whole.optimizer.state_dict()), copy.deepcopy(whole.setup.module.state_dict())
    whole()

    resumed = TrainStep(schemes.build(name).apply(setup(adamw)), batch())
    resumed.setup.module.load_state_dict(weights)
    resumed.optimizer.load_state_dict(saved)
    resumed()

    kinds = {type(leaf) for leaf in tree_leaves(saved)}
    assert kinds <= {Tensor, float, int, bool, type(None)}
    for one, other in zip(whole.setup.module.parameters(), resumed.setup.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_state_of_torchs_optimizer_is_rounded_as_it_is_loaded() -> None:
    exact = TrainStep(setup(adamw), batch())
    exact()
    step = TrainStep(schemes.build("adam8bit").apply(setup(adamw)), batch())
    step()
    packed_bytes = footprint.stored_bytes(footprint.optimizer_state(step.optimizer))

    step.optimizer.load_state_dict(exact.optimizer.state_dict())

    assert footprint.stored_bytes(footprint.optimizer_state(step.optimizer)) == packed_bytes
    step()


def test_the_state_of_another_model_is_refused() -> None:
    step = TrainStep(schemes.build("adam8bit").apply(setup(adamw)), batch())
    step()
    other = TrainStep(schemes.build("adam8bit").apply(setup(adamw, nn.Sequential(nn.Linear(64, 64)))), batch())

    with pytest.raises(ValueError, match="more parameters"):
        other.optimizer.load_state_dict(step.optimizer.state_dict())


def test_schedulers_may_write_numbers() -> None:
    step = TrainStep(schemes.build("adam8bit").apply(setup(adamw)), batch())
    before = [p.detach().clone() for p in step.setup.module.parameters()]
    for group in step.optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)

    step()

    assert all(torch.equal(p, old) for p, old in zip(step.setup.module.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda module: torch.optim.SGD(module.parameters(), lr=0.1), "the optimizer is SGD"),
        (lambda module: torch.optim.AdamW(module.parameters(), maximize=True), "maximize=True"),
        (lambda module: torch.optim.AdamW(module.parameters(), amsgrad=True), "amsgrad=True"),
    ],
)
def test_what_it_cannot_take_is_refused(make: MakeOptimizer, why: str) -> None:
    with pytest.raises(ConversionError, match=why):
        TrainStep(schemes.build("adam8bit").apply(setup(make)), batch())


def test_a_model_without_an_optimizer_is_told_what_to_do() -> None:
    with pytest.warns(UserWarning, match=r"torchao\.optim\.AdamW8bit"):
        conversion.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU()), "fewbit:3+adam8bit")
    with pytest.raises(ConversionError, match="adam8bit"):
        conversion.convert(nn.Linear(64, 64), "adam8bit")


def test_without_torchao_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)

    with pytest.raises(MeasurementError, match=r'pip install "actbench\[torchao\]"'):
        schemes.build("adam8bit").apply(setup(adamw))


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_torch_compiles_on_cuda_is_simulated_without_temporaries(name: str) -> None:
    case = Case(model="tiny-llama@vocab_size=65536", scheme=name, batch_size=1, sequence_length=8)
    cuda, cpu = measure(case), measure(case.model_copy(update={"device_profile": "cpu"}))

    assert (cuda.peak_phase, cpu.peak_phase) == ("backward", "optimizer")
    assert cuda.optimizer_bytes == pytest.approx(cpu.optimizer_bytes, rel=1e-2)  # torch's allocator rounds on CUDA
    assert cpu.peak_bytes - cuda.peak_bytes > 4 * 65536 * 64 * 4


exact_measurement = functools.cache(measure)  # once for all schemes


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    "scheme",
    [
        *("adamfp8", "adam4bit+release", "adam8bit+fsdp:2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "adamfp8"),
    ],
)
def test_the_estimated_time_is_of_a_kernel_that_reads_and_writes_all_it_steps(scheme: str) -> None:
    model = "tiny-llama@num_hidden_layers=2"
    base = Case(model=model, batch_size=2, sequence_length=32, meter="simulated", device_profile="rtx-4090")
    case = base.model_copy(update={"scheme": scheme})
    exact, found = exact_measurement(base), measure(case)
    assert exact.estimated is not None
    assert found.estimated is not None
    assert found.optimizer_bytes is not None
    kernels = {each.name: each for each in found.estimated.by_operator}["one_kernel"]
    parameters = sum(1 for _ in workloads.load_workload(case).setup(materialize=False, seed=0).module.parameters())
    ranks = found.mesh.dp if found.mesh is not None else 1

    assert kernels.calls == parameters
    # weights and moments are read and written, gradients are read; counters and all but a few levels are not
    moved = 3 * exact.weights_bytes / ranks + 2 * found.optimizer_bytes
    assert kernels.moved_bytes == pytest.approx(moved, rel=0.02)
    assert (found.estimated.optimizer_seconds > 0) == ("release" not in scheme)
    assert not found.estimated.unknown


def _with_state(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(module)
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return optimizer


def _with_scheduler(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(module)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


def _with_hook(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(module)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_with_state, "has state already; let make_optimizer make a fresh one"),
        (_with_scheduler, "a scheduler holds on to the optimizer already"),
        (_with_hook, "hooks of steps are registered already"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_that_was_used_is_refused(name: str, make: MakeOptimizer, message: str) -> None:
    found = schemes.build(name).apply(setup(make))

    with pytest.raises(UsageError, match=message):
        TrainStep(found, batch())
