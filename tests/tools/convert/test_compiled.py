"""Converting what torch.compile has compiled already."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from actbench import convert
from actbench.errors import ConversionError
from actbench.packing.forwardwrapper import ReboundForward
from actbench.tools.convert.model import conversion_of

WIDTH, ROWS = 32, 64


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), inner, nn.Linear(WIDTH, 8))


def returned(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[no-any-return]


def in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def a_part(model: nn.Sequential) -> nn.Module:
    model[2] = torch.compile(model[2], backend="aot_eager")
    return model


def saved_bytes(model: nn.Module) -> int:
    """Return what a step saves, each storage once; also of a compiled graph, which saves its own."""
    found: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.setdefault(t.data_ptr(), t), lambda t: t):
        output = model(torch.randn(ROWS, WIDTH))
    output.square().mean().backward()
    return sum(tensor.nbytes for tensor in found.values())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compiled", [returned, in_place, a_part])
@pytest.mark.parametrize("spec", ["gact", "smaq,on=activations", "encode:bf16,on=activations", "offload", "actnn"])
def test_what_cannot_be_compiled_is_refused_at_once_and_in_one_message(
    spec: str, compiled: Callable[[nn.Sequential], nn.Module]
) -> None:
    model = compiled(network())
    with pytest.raises(ConversionError, match=r"is compiled by torch\.compile, and .* cannot"):
        convert(model, spec)

    assert conversion_of(model) is None
    assert not any(isinstance(vars(module).get("forward"), ReboundForward) for module in model.modules())


QUICK = [("fewbit:1", returned, True), ("checkpoint,blocks=Sequential", in_place, True)]
ALL = itertools.product(["fewbit:1", "randomized:0.1", "checkpoint,blocks=Sequential"], [returned, in_place], [0, 1])


@pytest.mark.parametrize(
    ("spec", "compiled", "ran"),
    [each if each in QUICK else pytest.param(*each, marks=pytest.mark.sampled(slow=5)) for each in ALL],
)
def test_what_can_be_compiled_is_converted_inside_of_it(
    spec: str, compiled: Callable[[nn.Sequential], nn.Module], ran: bool
) -> None:
    expected, exact = saved_bytes(returned(convert(network(), spec))), saved_bytes(returned(network()))
    torch._dynamo.reset()
    model = compiled(network())
    if ran:
        saved_bytes(model)

    assert saved_bytes(convert(model, spec)) == expected < exact


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"),
        lambda: nn.Sequential(torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"), nn.Tanh()),
        lambda: in_place(nn.Linear(WIDTH, WIDTH)),  # type: ignore[arg-type]
    ],
)
def test_a_layer_that_is_compiled_by_itself_is_not_replaced(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConversionError, match="would still run in place of the converted module; convert first"):
        convert(make(), "randomized:0.5")


def test_what_is_refused_for_one_layer_leaves_the_others() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"))
    before = list(model)

    with pytest.raises(ConversionError, match="convert first"):
        convert(model, "randomized:0.5")

    assert all(one is other for one, other in zip(model, before, strict=True))
    model[1] = nn.Linear(WIDTH, WIDTH)
    assert convert(model, "randomized:0.5") is model
