from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actbench import scheme as schemes, workload as workloads
from actbench.measuring.meters.meter import MemoryReading
from actbench.model.records import Case
from actbench.scheme.setup import TrainStep
from actbench.simulator.fake import shapes_only
from actbench.simulator.profiles import get
from actbench.simulator.simulated import SimulatedMeter

Read = Callable[..., MemoryReading]
Count = Callable[[str], Counter[str]]

IMAGES = 8  # enough that the statistics of norms, which do not grow with the batch, are 0.3 % of what 2 bits keep


def step_of(meter: SimulatedMeter, model: str, spec: str, images: int) -> TrainStep:
    workload = workloads.load_workload(Case(model=model, batch_size=images, optimizer="sgd-momentum"))
    with meter.operators():
        setup = schemes.build(spec).apply(meter.adopt(workload.setup(materialize=False, seed=0)))
    with meter.active():
        return TrainStep(setup, meter.place(workload.batch(images, seed=0)))


@functools.cache
def _read(model: str, spec: str, images: int) -> MemoryReading:
    meter = SimulatedMeter(get("t4"))
    return meter.memory(step_of(meter, model, spec, images))


@functools.cache
def _count(model: str) -> Counter[str]:
    meter = SimulatedMeter(get("t4"))
    step, found = step_of(meter, model, "exact", IMAGES), Counter[str]()

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kind = type(module).__name__
        found[f"{kind} in"] += inputs[0].numel() // IMAGES
        found[f"{kind} out"] += output.numel() // IMAGES

    for module in step.setup.module.modules():
        module.register_forward_hook(note)
    with meter.active(), shapes_only():
        step.forward()
    return found


@pytest.fixture(scope="session")
def read() -> Read:
    """Return a reader of a training step on a simulated T4: of a model, a scheme and so many images of 224 pixels."""
    return lambda model, spec, images=IMAGES: _read(model, spec, images)


@pytest.fixture(scope="session")
def count() -> Count:
    """Return a counter of a model's elements for each image: ``Conv2d in`` are the inputs of all convolutions."""
    return _count


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Give a mesh of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()
