"""How many graphs a model is compiled to, and when: it is never said to be compiled when it is not."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from compilednets import Block, compiled, forward_of, gradients
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from actbench.errors import ConversionError, IdleError, UntraceableError
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.scheme.setup import TrainStep

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.slow
def test_graphs_that_free_what_they_read_say_how_to_retain_them() -> None:
    setup, x = compiled(Block(32)), torch.randn(4, 16, 32)
    gradients(setup, x)  # the first backward pass decides how it is compiled

    with pytest.raises(RuntimeError, match=r"set torch\._functorch\.config\.donated_buffer=False"):
        setup.forward({"x": x}).backward(retain_graph=True)  # type: ignore[no-untyped-call]


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
