"""bitsandbytes' Adam of 8 bits, where it is installed, and what is said where it is not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, MeasurementError, SpecError
from actbench.measuring.bench import measure
from actbench.measuring.failures import failure_of
from actbench.measuring.meters import footprint
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import MakeOptimizer, TrainingSetup, TrainStep

WIDE = "tiny-llama@vocab_size=65536"  # of which the embedding decides in the optimizer's step
PAGES_FROM = 100_000


def setup(make: MakeOptimizer) -> TrainingSetup:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 130), nn.GELU(), nn.Linear(130, 64))
    return TrainingSetup(module, loss=_loss, make_optimizer=make)


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    return (module(batch["x"]) - batch["y"]).square().mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3)


def batch() -> Batch:
    random = torch.Generator().manual_seed(1)
    return {"x": torch.randn(32, 64, generator=random), "y": torch.randn(32, 64, generator=random)}


def step_of(spec: str, make: MakeOptimizer = adamw) -> TrainStep:
    return TrainStep(schemes.build(spec).apply(setup(make)), batch())


def state_bytes(*sizes: int) -> int:
    """Return the bytes of the moments of parameters of so many elements, by closed form."""
    coded = [size for size in sizes if size >= 4096]
    moments = sum(size + 4 * -(-size // 256) for size in coded) + sum(4 * size for size in sizes if size < 4096)
    return 2 * moments + (2 * 256 * 4 if coded else 0)


@pytest.fixture
def installed() -> None:
    """Leave the test out where there is no bitsandbytes."""
    pytest.importorskip("bitsandbytes")


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("spec", ["adam8bit:bnb", "adam8bit:bnb,paged=true"])
@pytest.mark.parametrize(
    "make", [adamw, lambda module: torch.optim.Adam(module.parameters(), lr=3e-3)], ids=["adamw", "adam"]
)
def test_it_trains_as_the_exact_optimizer_does(make: Callable[..., torch.optim.Optimizer], spec: str) -> None:
    exact_step, step = step_of("exact", make), step_of(spec, make)

    exact, found = [float(exact_step()) for _ in range(60)], [float(step()) for _ in range(60)]

    assert found != exact
    assert found[-1] < 0.05 * found[0]
    assert sum(found) == pytest.approx(sum(exact), rel=0.1)


@pytest.mark.usefixtures("installed")
def test_weights_decay_as_torchs_do() -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)

    found, exact = step_of("adam8bit:bnb", make), step_of("exact", make)
    for step in (found, exact):
        for parameter in step.setup.module.parameters():
            parameter.grad = torch.zeros_like(parameter)  # so that the decay alone is seen
        step.update()

    for one, other in zip(found.setup.module.parameters(), exact.setup.module.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("installed")
def test_the_state_has_its_bytes() -> None:
    step = step_of("adam8bit:bnb")
    step()

    found = footprint.stored_bytes(footprint.optimizer_state(step.optimizer))
    assert found == state_bytes(64 * 130, 130, 130 * 64, 64)


@pytest.mark.sampled(slow=1)
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("spec", ["adam8bit:bnb", "pure:bf16+adam8bit:bnb"])
def test_a_step_is_simulated_with_its_state_and_its_temporaries(spec: str) -> None:
    case = Case(model=WIDE, scheme=spec, batch_size=1, sequence_length=8, gradient_quality=False, min_steps=1)
    case = case.model_copy(update={"min_seconds": 0.0, "warmup_steps": 0})

    real = measure(case.model_copy(update={"meter": "cpu"}))
    simulated = measure(case.model_copy(update={"device_profile": "cpu"}))

    assert (real.peak_phase, simulated.peak_phase) == ("optimizer", "optimizer")
    assert simulated.optimizer_bytes == real.optimizer_bytes
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, abs=1024)


@pytest.mark.sampled(slow=1)
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("beside", ["", "+release"])
def test_paged_moments_are_none_of_a_simulated_device(beside: str) -> None:
    def measured(spec: str) -> Measurement:
        case = Case(model=WIDE, scheme=spec + beside, batch_size=1, sequence_length=8, device_profile="rtx-4090")
        return measure(case)

    stays, pages = measured("adam8bit:bnb"), measured("adam8bit:bnb,paged=true")

    assert stays.optimizer_bytes is not None
    assert pages.optimizer_bytes is not None
    embeddings = 2 * 65536 * 64  # and the head
    assert stays.optimizer_bytes - pages.optimizer_bytes == 2 * embeddings
    assert stays.peak_bytes - pages.peak_bytes == 2 * embeddings
    assert (stays.reserved_bytes or 0) - (pages.reserved_bytes or 0) >= 2 * embeddings  # in whole segments
    assert stays.host_bytes is not None
    assert pages.host_bytes is not None
    assert pages.host_bytes - stays.host_bytes == 2 * embeddings
    assert any("paged moments" in warning for warning in pages.warnings)


@pytest.mark.usefixtures("installed")
def test_a_run_goes_on_from_a_saved_state() -> None:
    whole = step_of("adam8bit:bnb")
    for _ in range(3):
        whole()
    saved, weights = copy.deepcopy(whole.optimizer.state_dict()), copy.deepcopy(whole.setup.module.state_dict())
    whole()

    resumed = step_of("adam8bit:bnb")
    resumed.setup.module.load_state_dict(weights)
    resumed.optimizer.load_state_dict(saved)
    resumed()

    for one, other in zip(whole.setup.module.parameters(), resumed.setup.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("installed")
def test_the_state_of_torchs_optimizer_is_refused() -> None:
    exact, step = step_of("exact"), step_of("adam8bit:bnb")
    exact()

    with pytest.raises(ValueError, match="state is of torch's Adam"):
        step.optimizer.load_state_dict(exact.optimizer.state_dict())


@pytest.mark.usefixtures("installed")
def test_it_steps_within_the_backward_pass() -> None:
    alone, released = step_of("adam8bit:bnb"), step_of("release+adam8bit:bnb")
    for _ in range(3):
        alone()
        released()

    for one, other in zip(alone.setup.module.parameters(), released.setup.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda module: torch.optim.SGD(module.parameters(), lr=0.1), "SGD; bitsandbytes has a twin"),
        (
            lambda module: torch.optim.AdamW(module.parameters(), maximize=True),
            "maximize=True, which the opt",
        ),
        (lambda module: torch.optim.Adam(module.parameters(), weight_decay=0.1), "decays weights as AdamW does"),
    ],
)
def test_what_it_cannot_take_is_refused(make: MakeOptimizer, why: str) -> None:
    with pytest.raises(ConversionError, match=why):
        step_of("adam8bit:bnb", make)


def test_pages_are_of_bitsandbytes_alone() -> None:
    with pytest.raises(SpecError, match="adam8bit:bnb,paged=true"):
        schemes.build("adam8bit,paged=true")
    with pytest.raises(SpecError, match="library"):
        schemes.build("adam8bit:torch")


@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_without_bitsandbytes_a_row_is_unavailable_with_the_command(
    meter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actbench.methods.lowbit import lowbitadam

    lowbitadam.bnb_adam.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(MeasurementError, match=r'pip install "actbench\[bitsandbytes\]"') as raised:
        measure(Case(model="tiny-gpt2", scheme="adam8bit:bnb", batch_size=1, sequence_length=8, meter=meter))
    assert failure_of(raised.value).reason == "unavailable"
