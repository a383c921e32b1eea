from dataclasses import replace

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, NothingToConvertError, SpecError
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator.cublas import Workspaces
from actbench.simulator.profiles import get
from actbench.simulator.simulated import SimulatedMeter

WIDTH, BATCH = 256, 64


def setup(make=torch.optim.AdamW):
    return TrainingSetup(
        nn.Linear(WIDTH, WIDTH, bias=False),
        loss=lambda module, batch: module(batch["x"]).sum(),
        make_optimizer=lambda module: make(module.parameters()),
    )


def profile(name):
    """Return a device on which the workspaces of cuBLAS stay, wherever a peak is."""
    return replace(get(name), torch=(2, 14))


def simulated(scheme, name):
    meter = SimulatedMeter(profile(name))
    with meter.active():
        changed = schemes.build(scheme).apply(meter.adopt(setup()))
        return meter.memory(TrainStep(changed, meter.place({"x": torch.randn(BATCH, WIDTH)})))


def test_a_device_holds_nothing_of_the_optimizer_not_even_while_it_steps():
    exact, found = simulated("exact", "v100-16gb"), simulated("optimizer_offload", "v100-16gb")
    matrix, workspace = 4 * WIDTH * WIDTH, sum(Workspaces(profile("v100-16gb")).kept.values())

    assert (exact.optimizer_bytes, found.optimizer_bytes) == (2 * matrix, 0)
    assert found.gradients_bytes == exact.gradients_bytes == matrix
    assert found.peak_bytes < workspace + 2 * matrix + matrix  # weight and gradient, batch and output
    assert exact.peak_bytes >= workspace + 4 * matrix


def test_on_the_cpu_nothing_moves():
    exact, found = simulated("exact", "cpu"), simulated("optimizer_offload", "cpu")

    assert found == exact


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match="optimizer_offload and adam8bit both say how optimizer state is kept"):
        schemes.build("optimizer_offload+adam8bit")
    with pytest.raises(NothingToConvertError, match="has no parameter to train"):
        schemes.build("optimizer_offload").apply(TrainingSetup(nn.ReLU()))
    for make, naming in (
        (torch.optim.LBFGS, "the optimizer is LBFGS"),
        (lambda parameters: torch.optim.Adam(parameters, differentiable=True), "differentiable=True"),
    ):
        found = schemes.build("optimizer_offload").apply(setup(make))
        with pytest.raises(ConversionError, match=naming):
            TrainStep(found, {})


@pytest.mark.parametrize("scheme", ["optimizer_offload", "release+optimizer_offload"])
def test_records_name_the_optimizer_that_steps(scheme):
    step = TrainStep(schemes.build(scheme).apply(setup()), {"x": torch.randn(BATCH, WIDTH)})

    assert step.optimizer_class == "AdamW"
