"""Every scheme that a script can take runs in one of five architectures on a simulated card, or says why not."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from architectures import ARCHITECTURES, train
from mlptraining import model
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import RunScript

import actbench
from actbench import scheme as schemes
from actbench.errors import ActbenchError
from actbench.measuring.meters.meter import MemoryReading
from actbench.model.measured import Measurement
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter
from actbench.tools.script.answers.suggestions import suggestions
from actbench.tools.script.experiment import APPLIED
from actbench.tools.script.steps.schemes import refused

CARD = "rtx-4060"
EXAMPLES = {"encode": "encode:int:6", "fewbit": "fewbit:3", "gact": "gact:L1", "randomized": "randomized:0.5"}
SPECS = tuple(
    EXAMPLES.get(name, name)
    for name in schemes.alone()
    if name != "exact" and set(schemes.lookup(name).model_construct().changes) <= APPLIED
)
OF_LINEAR = ("randomized:0.5", "dropit:0.25", "wtacrs:0.5", "float8:rowwise", "velora", "division:8")
"""Schemes that replace linear layers."""


@pytest.mark.usefixtures("operators_run_once")
@pytest.mark.sampled(fast=2, slow=12)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_script_runs_under_each_scheme_or_it_is_refused(spec: str, name: str) -> None:
    simulation = actbench.simulate(CARD, scheme=schemes.build(spec))
    with suppress(ActbenchError), simulation:
        train(name)
        raise AssertionError("the run did not end by itself")
    assert len(simulation.steps.done) >= 1  # a refusal comes after the first step, which has no scheme


@pytest.mark.usefixtures("operators_run_once")
@pytest.mark.sampled(fast=1, slow=6)
@pytest.mark.parametrize("name", ["llama", "roberta", "vit"])
@pytest.mark.parametrize("spec", OF_LINEAR)
def test_linear_layers_are_replaced_inside_of_a_script(spec: str, name: str) -> None:
    """Queries, keys and values read one input, which such a scheme packs once and finds again."""
    with actbench.simulate(CARD, scheme=schemes.build(spec)) as card:
        train(name)

    assert card.measurement.sites


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def setup_on(device: str) -> TrainingSetup:
    return TrainingSetup(
        nn.Sequential(Block(), Block(), nn.Linear(64, 8)).to(device),
        loss=lambda module, batch: module(batch["x"]).square().mean(),
        make_optimizer=lambda module: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]),
    )


def reading_by_the_meter(spec: str, profile: str) -> MemoryReading:
    meter = SimulatedMeter(profiles.get(profile))
    with meter.operators():
        setup, batch = actbench.apply(meter.adopt(setup_on("cpu")), spec), {"x": torch.randn(4, 64)}
        with meter.active():
            return meter.memory(TrainStep(setup, meter.place(batch)))


def train_under(spec: str, device: str) -> None:
    step = TrainStep(actbench.apply(setup_on(device), spec), {"x": torch.randn(4, 64, device=device)})
    for _ in range(4):
        step()


ADAPTERS = ("lora:8", "lora:8,adapter=dora", "lora:8,adapter=vera", "lora:8,adapter=lora_fa", "lora:8,adapter=lokr")


@pytest.mark.sampled(fast=1, slow=5)
@pytest.mark.parametrize("profile", ["cpu", CARD])
@pytest.mark.parametrize("spec", [*ADAPTERS, "qlora", "lora:8+fewbit:3"])
def test_adapters_applied_inside_of_a_simulation_need_what_the_meter_says(spec: str, profile: str) -> None:
    expected = reading_by_the_meter(spec, profile)
    with actbench.simulate(profile) as card:
        train_under(spec, "cuda" if profile == CARD else "cpu")

    found = card.measurement
    assert found.weights_bytes == expected.weights_bytes
    assert found.optimizer_bytes == expected.optimizer_bytes
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.002)  # a loop holds the loss of the step before


@pytest.mark.parametrize("spec", ["exact", "lora:8"])
def test_a_training_that_stays_on_the_host_takes_nothing_of_the_card(spec: str) -> None:
    with actbench.simulate(CARD) as card:
        train_under(spec, "cpu")

    assert card.measurement.weights_bytes == card.measurement.gradients_bytes == 0


def test_schemes_are_refused_as_when_they_are_applied() -> None:
    """The models stay as they are: each scheme is applied in a process of its own."""
    module, other = model(), model()
    both = [torch.optim.AdamW(module.parameters()), torch.optim.SGD(other.parameters())]
    asked = ("checkpoint", "fewbit:3", "lora:16", "offload")

    def no(roots: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> tuple[str, ...]:
        return refused(asked, roots, optimizers, are_fake=True)

    assert no([module], both[:1]) == ("checkpoint",), "it has no blocks"
    assert no([module], both[1:]) == asked, "no optimizer trains it"
    assert no([], both) == asked
    shared = [torch.optim.SGD(module[place].parameters()) for place in (0, 2)]  # type: ignore[index]
    assert no([module], shared) == ("checkpoint", "lora:16"), "one optimizer has to train all that is frozen"
    assert type(module[1]) is nn.GELU  # type: ignore[index]
    assert refused(asked, [], both, are_fake=False) == asked


@pytest.mark.parametrize(("reentrant", "again"), [(None, False), (True, True), (False, True)])
def test_modules_that_are_recomputed_are_noticed(reentrant: bool | None, again: bool) -> None:
    with actbench.simulate("rtx-4090") as card:
        module = model().cuda()
        optimizer = torch.optim.SGD(module.parameters())
        while True:
            x = torch.randn(64, 512, device="cuda", requires_grad=True)
            y = module(x) if reentrant is None else checkpoint(module, x, use_reentrant=reentrant)
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert card.lines.runs_again == again


IN_PARTS = """
import torch
layer = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.Adam(layer.parameters())
x = torch.rand(2**18, 4096, device="cuda")
while True:
    torch.relu(x @ layer.weight.T + layer.bias).exp().sigmoid().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BLOCKS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def forward(self, x):
        return x + self.mlp(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = {call}
        return x

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(2**16, 512, device="cuda", requires_grad=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_no_scheme_is_advised_that_the_next_command_refuses_or_that_is_on(run: RunScript) -> None:
    def advised(text: str) -> set[str]:
        found = run(text)
        assert isinstance(found, Measurement), found
        assert found.peak_parts is not None
        assert found.peak_parts.activation_bytes > 0.1 * found.peak_bytes
        unasked = found.model_copy(update={"built": None, "memory_limit_bytes": found.peak_bytes})
        assert {"checkpoint", "offload"} <= {each.scheme for each in suggestions(unasked, most=None)}
        tight = found.model_copy(update={"memory_limit_bytes": found.peak_bytes})
        return {each.scheme for each in suggestions(tight, most=None)}

    assert advised(IN_PARTS) == set()
    plain = advised(BLOCKS.format(call="layer(x)"))
    assert {"checkpoint", "offload", "fewbit:3"} <= plain
    again = advised(BLOCKS.format(call="checkpoint(layer, x, use_reentrant=False)"))
    assert "checkpoint" not in again
    assert "offload" in again
