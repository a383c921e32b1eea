"""A model is compiled under a memory budget, keeps less for it, and is never said to be compiled when it is not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import actbench
from actbench import scheme as schemes
from actbench.errors import ConversionError, IdleError, MeasurementError, NothingToConvertError, UntraceableError
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.meter import MemoryReading
from actbench.methods.compile import partition
from actbench.methods.compile.forward import CompiledForward
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep

EAGER = "backend=aot_eager_decomp_partition"


class Block(nn.Module):
    """A block of a transformer, without dropout unless it is asked for."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.before, self.middle, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        found: Tensor = x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.middle(x)))))
        return found


def transformer() -> nn.Module:
    return nn.Sequential(*(Block(32) for _ in range(3)), nn.LayerNorm(32), nn.Linear(32, 8))


def convolutions() -> nn.Module:
    layers = [part for _ in range(3) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def setup_of(module: nn.Module) -> TrainingSetup:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(batch["x"]).square().mean()
        return found

    return TrainingSetup(module, loss=loss, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0))


def compiled(module: nn.Module, spec: str = "compile:0.5") -> TrainingSetup:
    return schemes.build(f"{spec},{EAGER}").apply(setup_of(module))


def forward_of(module: nn.Module) -> CompiledForward:
    found = CompiledForward.of(module)
    assert found is not None
    return found


def read(setup: TrainingSetup, x: Tensor) -> MemoryReading:
    return CpuMeter().memory(TrainStep(setup, {"x": x}))


def gradients(setup: TrainingSetup, x: Tensor) -> list[Tensor]:
    setup.module.zero_grad()
    setup.forward({"x": x}).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in setup.module.parameters() if parameter.grad is not None]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_graphs_that_free_what_they_read_say_how_to_retain_them() -> None:
    setup, x = compiled(Block(32)), torch.randn(4, 16, 32)
    gradients(setup, x)  # the first backward pass decides how it is compiled

    with pytest.raises(RuntimeError, match=r"set torch\._functorch\.config\.donated_buffer=False"):
        setup.forward({"x": x}).backward(retain_graph=True)  # type: ignore[no-untyped-call]


TRANSFORMER = (transformer, (4, 16, 32))
CONVOLUTIONS = (convolutions, (8, 8, 12, 12))


@pytest.mark.parametrize(
    ("make", "shape", "budgets"),
    [
        pytest.param(*TRANSFORMER, (1, 0), marks=pytest.mark.slow),
        pytest.param(*TRANSFORMER, (1, 0.7, 0.5, 0.3, 0.1, 0), marks=pytest.mark.exhaustive),
        pytest.param(*CONVOLUTIONS, (1, 0.5, 0), marks=pytest.mark.exhaustive),
    ],
)
def test_a_smaller_budget_keeps_less_and_gradients_stay(
    make: Callable[[], nn.Module], shape: tuple[int, ...], budgets: tuple[float, ...]
) -> None:
    exact, x = make(), torch.randn(shape)
    before = copy.deepcopy(exact.state_dict())
    wanted, kept = gradients(setup_of(exact), x), [read(setup_of(exact), x).activation_bytes]

    for budget in budgets:
        exact.load_state_dict(before)
        setup = compiled(copy.deepcopy(exact), f"compile:{budget}")
        found = gradients(setup, x)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        reading = read(setup, x)
        kept.append(reading.activation_bytes)
        states = {name: tensor for name, tensor in setup.module.state_dict().items() if "num_batches" in name}
        assert all(int(count) == 3 for count in states.values())  # steps, of which each counts its batch once
        assert reading.loss == pytest.approx(setup_of(exact).forward({"x": x}).item())

    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    assert kept[-1] < kept[0] / 10  # what the loss outside of the graph reads


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dropout_that_runs_again_drops_what_it_dropped(backend: str) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            self.out = nn.functional.dropout(self.weight.sin() * x, 0.5)
            return self.out.exp()

    for budget in (1, 0.1, 0):
        module = Drops()
        out = schemes.build(f"compile:{budget},backend={backend}").apply(setup_of(module)).module(torch.rand(64) + 1)
        (gradient,) = torch.autograd.grad(out.sum(), module.parameters())

        dropped = out == 1  # exp(0)
        assert 10 < int(dropped.sum()) < 54
        assert torch.equal(gradient == 0, dropped)


def test_attention_that_runs_again_drops_what_it_dropped() -> None:
    class Attends(nn.Module):
        """Attention of which the values are unit vectors, so that it returns its weights as they were dropped."""

        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.eye(16))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, self.values.sin().asin()[None], dropout_p=0.5)

    for budget in (1, 0):
        module = Attends()
        out = compiled(module, f"compile:{budget}").module(torch.randn(1, 16, 8))
        (gradient,) = torch.autograd.grad(out.cumsum(1).sum(), module.parameters())

        assert 64 < int((out == 0).sum()) < 192
        weight = torch.arange(16.0, 0, -1)[:, None].expand(16, 16)
        torch.testing.assert_close(gradient, out[0].T @ weight, rtol=1e-4, atol=1e-5)


def test_a_graph_that_would_draw_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "_LEAST_BUDGET", 0.0)  # so that torch's partitioner keeps nothing

    with pytest.raises(ConversionError, match="would draw random numbers of the forward pass again"):
        compiled(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), "compile:0").module(
            torch.randn(4, 8)
        )


def test_inductor_makes_the_kernels_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh")  # which is everywhere
    assert forward_of(schemes.build("compile").apply(setup_of(transformer())).module).backend == "inductor"

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert forward_of(schemes.build("compile").apply(setup_of(transformer())).module).backend == EAGER.split("=")[1]
    with pytest.raises(MeasurementError, match="needs the C\\+\\+ compiler no-such-compiler"):
        schemes.build("compile:0.5,backend=inductor").apply(setup_of(transformer()))


@pytest.mark.slow
def test_inductor_obeys_the_budget() -> None:
    x, exact = torch.randn(8, 32), nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    wanted, kept = gradients(setup_of(exact), x), [read(setup_of(exact), x).activation_bytes]

    for budget in (1, 0):
        setup = schemes.build(f"compile:{budget},backend=inductor").apply(setup_of(copy.deepcopy(exact)))
        for one, other in zip(gradients(setup, x), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        kept.append(read(setup, x).activation_bytes)

    uncompiled, all_of_it, inputs_alone = kept
    assert uncompiled >= all_of_it > inputs_alone


class Branches(nn.Module):
    """A network that looks at a value, which ends a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum().item() > 0:
            y = 2 * y
        found: Tensor = self.layer(y)
        return found


def test_a_model_of_several_graphs_is_refused_with_the_reason() -> None:
    with pytest.raises(ConversionError, match=r"no graph of Branches: .*fullgraph=false"):
        compiled(Branches()).module(torch.randn(4, 8))


def test_where_several_graphs_are_allowed_it_is_said_how_many_ran() -> None:
    setup = compiled(Branches(), "compile:0.5,fullgraph=false")
    setup.module(torch.randn(4, 8)).sum().backward()

    (said,) = (warning for part in setup.parts for warning in part.after())
    assert "2 compiled graphs" in said


def test_a_model_that_runs_as_it_is_is_never_called_compiled() -> None:
    setup, x = compiled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), torch.randn(4, 8)

    with pytest.raises(UntraceableError, match="every operator is watched"), FlopCounterMode(display=False):
        setup.module(x)
    with pytest.raises(ConversionError, match="uncompiled, without"), torch.compiler.set_stance("force_eager"):
        setup.module(x)
    assert not forward_of(setup.module).graphs


def test_too_many_graphs_of_one_model_are_an_error() -> None:
    setup = compiled(nn.Sequential(nn.Linear(8, 8)), "compile:0.5,fullgraph=false")

    with torch._dynamo.config.patch(recompile_limit=1):
        setup.module(torch.randn(4, 8))
        with pytest.raises(ConversionError):
            setup.module(torch.randn(2, 4, 8))


def test_a_step_that_calls_parts_of_the_model_alone_is_idle() -> None:
    setup = compiled(nn.Sequential(nn.Linear(8, 8)))
    setup.module[0](torch.randn(4, 8)).sum().backward()  # type: ignore[operator, index]

    with pytest.raises(IdleError, match="only="):
        setup.parts[0].after()


@pytest.mark.slow
def test_parts_of_a_model_are_compiled_alone() -> None:
    exact, x = transformer(), torch.randn(2, 8, 32)
    setup = compiled(copy.deepcopy(exact), "compile:0,only=0/2")

    for one, other in zip(gradients(setup, x), gradients(setup_of(exact), x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert [forward_of(setup.module[place]).graphs for place in (0, 2)] == [1, 1]  # type: ignore[index, arg-type]
    assert CompiledForward.of(setup.module) is None


def test_nothing_is_compiled_in_later_steps_or_without_gradients() -> None:
    setup, x = compiled(nn.Sequential(nn.Linear(8, 8), nn.GELU())), torch.randn(4, 8)
    with torch.no_grad():
        setup.module(x)
    assert forward_of(setup.module).graphs == 0

    meter, step = CpuMeter(), TrainStep(setup, {"x": x})
    meter.memory(step)
    assert forward_of(setup.module).graphs == 1
    meter.seconds(step, 3)
    assert forward_of(setup.module).graphs == 1


def test_a_copy_is_compiled_for_itself_and_a_model_is_freed() -> None:
    model, x = compiled(nn.Sequential(nn.Linear(8, 8), nn.GELU())).module, torch.randn(4, 8)
    model(x).sum().backward()
    twin = copy.deepcopy(model)
    twin(x).sum().backward()
    weight = weakref.ref(model[0].weight)  # type: ignore[index]

    assert forward_of(twin).graphs == 1
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("spec", ["actnn", "encode:int:6,on=maps", "msln", "offload", "chunked_loss,head=4"])
def test_packing_schemes_are_refused_beside_it(spec: str) -> None:
    with pytest.raises(ConversionError, match=r"cannot be compiled: .*leave out compile or the other scheme"):
        schemes.build(f"{spec}+compile:0.5,{EAGER}").apply(setup_of(transformer()))


def test_what_is_compiled_already_or_not_trained_is_refused() -> None:
    model = transformer()
    model.compile(backend="eager")
    with pytest.raises(ConversionError, match="compiled already"):
        compiled(model)
    with pytest.raises(ConversionError, match="compiled already"):
        compiled(compiled(transformer()).module)
    with pytest.raises(NothingToConvertError, match="no parameter to train"):
        compiled(nn.Flatten())


def test_convert_compiles_in_place_and_refuses_what_it_cannot_read() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    keys, own = list(model.state_dict()), dict(vars(model))

    with pytest.raises(UntraceableError):
        actbench.convert(model, f"compile:0.5,{EAGER}", example_batch=x)
    assert vars(model) == own

    converted: Any = actbench.convert(model, f"compile:0.5,{EAGER}")
    converted(x).sum().backward()
    assert converted is model
    assert list(converted.state_dict()) == keys
    assert forward_of(model).graphs == 1
