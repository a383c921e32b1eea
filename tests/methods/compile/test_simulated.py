"""What compiled models hold is simulated as the CPU's allocator reports it: by inductor's programs without kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame

from actbench import scheme as schemes
from actbench.measuring.bench import measure
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.meter import MemoryReading
from actbench.methods.compile.forward import CompiledForward
from actbench.methods.compile.simulated import compiled_under_modes, form
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import inductor, profiles
from actbench.simulator.simulated import SimulatedMeter

WIDTH = 64
SHAPE = (4, 32, WIDTH)


class Block(nn.Module):
    """A gated MLP with a norm and dropout; with ``breaks``, its graph ends before the activation and begins after."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.norm, self.drop, self.breaks = nn.LayerNorm(WIDTH), nn.Dropout(0.1), breaks
        self.gate, self.up, self.down = (nn.Linear(*sizes) for sizes in ((WIDTH, 256), (WIDTH, 256), (256, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate, up = self.gate(y), self.up(y)
        gate = uncompiled(gate) if self.breaks else nn.functional.silu(gate)
        found: Tensor = x + self.drop(self.down(gate * up))
        return found


@torch.compiler.disable
def uncompiled(x: Tensor) -> Tensor:
    return nn.functional.silu(x)


def mean_of_squares(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


def setup_of(module: nn.Module) -> TrainingSetup:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    return TrainingSetup(module, loss=mean_of_squares, make_optimizer=sgd)


def simulated(module: nn.Module, spec: str, profile: str = "cpu") -> MemoryReading:
    meter = SimulatedMeter(profiles.get(profile))
    with meter.operators():
        setup = schemes.build(spec).apply(meter.adopt(setup_of(module)))
        with meter.active():
            step = TrainStep(setup, meter.place({"x": torch.randn(SHAPE)}))
        return meter.memory(step)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_passes_that_overlap_in_two_threads_leave_torch_as_it_was() -> None:
    before, inside, leave = convert_frame.any_torch_dispatch_mode_on_stack, threading.Event(), threading.Event()

    def second() -> None:
        with compiled_under_modes():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=second)
    with compiled_under_modes():
        thread.start()
        inside.wait(0.2)  # it waits for this block to end
    leave.set()
    thread.join()

    assert convert_frame.any_torch_dispatch_mode_on_stack is before


def test_graphs_are_alike_on_inputs_of_one_type_only() -> None:
    graph = torch.fx.symbolic_trace(nn.Identity())
    x = torch.randn(3)

    assert form(graph, [x]) == form(graph, [torch.randn(3)])
    assert form(graph, [x]) != form(graph, [nn.Parameter(x, requires_grad=False)])
    assert form(graph, [x.as_subclass(Other)]) is None


class Other(Tensor):
    """A tensor that may decide more than its shape and type say."""


@pytest.mark.slow
def test_blocks_are_compiled_once_and_keep_what_the_allocator_says() -> None:
    module, real = (nn.Sequential(Block(), Block(), Block()) for _ in range(2))
    setup = schemes.build("compile:1,only=[0-2],backend=aot_eager_decomp_partition").apply(setup_of(real))
    setup.forward({"x": torch.randn(SHAPE)}).backward()  # type: ignore[no-untyped-call]
    setup.module.zero_grad()
    wanted = CpuMeter().memory(TrainStep(setup, {"x": torch.randn(SHAPE)}))

    found = simulated(module, "compile:1,only=[0-2]")

    assert found.activation_bytes == wanted.activation_bytes
    assert found.peak_bytes < wanted.peak_bytes  # the kernels of groups have no temporaries between their operators
    bound = [forward for block in module if (forward := CompiledForward.of(block)) is not None]
    assert [forward.graphs for forward in bound] == [1, 1, 1]
    assert {id(forward.shared_code) for forward in bound} == {id(bound[0].shared_code)}
    assert len(bound[0].shared_code) == 2  # nobody asks for the gradient of what goes into the first


@pytest.mark.slow
def test_what_lies_between_graphs_is_followed() -> None:
    whole, broken = simulated(Block(), "compile:1"), simulated(Block(breaks=True), "compile:1,fullgraph=false")

    # the output of the uncompiled activation, which a whole graph computes again
    assert broken.activation_bytes == whole.activation_bytes + 4 * 32 * 256 * 4


@pytest.mark.slow
@pytest.mark.skipif(inductor.lacks() is not None, reason="inductor is not simulated for a card here")
def test_a_step_on_a_card_runs_inductors_code_for_it_and_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # apart from what the user has compiled
    eager, on_cuda = (simulated(Block(), spec, "a100-80gb") for spec in ("exact", "compile:1"))

    assert on_cuda.approximate == ()
    assert on_cuda.activation_bytes < eager.activation_bytes  # an activation is computed again
    assert on_cuda.peak_bytes < eager.peak_bytes
    assert on_cuda.estimated is None
    assert on_cuda.untimed is not None
    assert on_cuda.untimed.startswith("No step time is estimated: compile")


MODELS = ("tiny-roberta", "tiny-llama", "tiny-gpt2", "tiny-vit", "resnet-cifar")
SPECS = ("compile:0.5", "pure:bfloat16+compile:1", "autocast:bfloat16+compile:1")


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("model", "spec"), [*((model, "compile:1") for model in MODELS), *(("tiny-gpt2", spec) for spec in SPECS)]
)
def test_a_model_holds_what_inductor_holds_on_a_cpu(model: str, spec: str) -> None:
    case = Case(
        model=model, scheme=spec, batch_size=4, meter="cpu", min_steps=1, min_seconds=0.0, gradient_quality=False
    )
    wanted = measure(case)
    torch._dynamo.reset()

    found = measure(case.model_copy(update={"meter": "simulated", "device_profile": "cpu"}))

    assert isinstance(wanted, Measurement)
    assert found.activation_bytes == pytest.approx(wanted.activation_bytes, rel=0.002)
    if "16" not in spec:  # what oneDNN needs in half types is not known
        assert found.peak_bytes == pytest.approx(wanted.peak_bytes, rel=0.005)
