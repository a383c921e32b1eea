"""Two schemes that are limited to parts of a model: on one block each acts, or they are refused; on two they stand."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring import inspection
from actbench.methods.compile.forward import CompiledForward
from actbench.scheme.base import OF_PARTS
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.card import simulated
from actbench.simulator.simulated import SimulatedMeter
from actbench.testing import PARTS, check_scheme

pytestmark = pytest.mark.usefixtures("operators_run_once")
SPECS = {
    "checkpoint": "checkpoint,blocks=Block",
    "encode": "encode:int:6,on=activations",
    "fewbit": "fewbit:3",
    "lora": "lora:4",
    "qlora": "qlora:4",
    "randomized": "randomized:0.5",
    "selective": "selective,blocks=Block",
    "smaq": "smaq,on=activations",
}
UNTRACEABLE = "compile"  # tests/contract/test_compiled.py compiles it beside others
OF_ONE_FAMILY = "liger"  # works on Llama's layers alone: tests/methods/liger has it beside others
COMPILED = {
    "checkpoint", "coat", "fewbit", "invact", "lora", "qlora", "randomized", "regelu2", "resilu2", "selective", "smaq"
}  # fmt: skip
HOOKS = ("backrazor", "coat", "encode", "gact", "mesa", "smaq")
EXCLUSIVE = (
    {*HOOKS, "offload"},  # of nested hooks only the innermost run
    {*HOOKS, "selective", "wtacrs"},  # hooks would not see the results that these keep
    {"checkpoint", "selective"},
    # each replaces the linear layers
    {"actnn", "division", "dropit", "float8", "hyclora", "prac", "randomized", "velora", "wtacrs"},
    {"fewbit", "invact", "regelu2", "resilu2"},  # each replaces the activation
    {"lora", "qlora"},
)
"""Sets of schemes of which a block may have but one."""

AROUND = {*HOOKS, "offload", "checkpoint", "selective"}
"""Schemes that run around what others have made of the layers of a block."""

IN_A_SECOND_RUN = ("actnn", "fewbit", "msln", "regelu2", "resilu2", "velora")
SMALL = 64 * 1024  # bytes of buffers, of which a recomputed block holds copies


class Block(nn.Module):
    """A block in which every scheme finds something to work on."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.wide, self.activation = nn.LayerNorm(64), nn.Linear(64, 256), activation
        self.narrow, self.drop = nn.Linear(256, 64), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.drop(self.narrow(self.activation(self.wide(self.norm(x)))))
        return result


def of_parts() -> list[str]:
    """Return the names of the schemes that can be limited to parts, but for those that are never simulated."""
    changes = {name: {*schemes.build(SPECS.get(name, name)).changes} for name in schemes.alone()}
    return [
        name
        for name in changes
        if changes[name] and changes[name] <= OF_PARTS and name not in (UNTRACEABLE, OF_ONE_FAMILY)
    ]


PAIRS = list(itertools.combinations(of_parts(), 2))


def at(name: str, path: str) -> str:
    return f"{SPECS.get(name, name)},only={path}"


Activations = tuple[type[nn.Module], type[nn.Module]]
"""Those of the two blocks."""


def activation_for(*names: str) -> type[nn.Module]:
    return nn.SiLU if "resilu2" in names else nn.GELU


def setup_of(spec: str, activations: Activations) -> TrainingSetup:
    torch.manual_seed(0)
    setup = TrainingSetup(
        nn.Sequential(nn.Linear(64, 64), *(Block(each()) for each in activations)),
        lambda model, batch: model(batch["x"]).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    return schemes.build(spec).apply(setup)


def rows() -> dict[str, Any]:
    return {"x": torch.empty(32, 64, 64)}


@functools.cache
def read(spec: str, activation: type[nn.Module]) -> tuple[int, int, float]:
    """Return the activation bytes of a simulated step, its peak in bytes, and its seconds."""
    # so few processors that no buffer of a sum is larger than what layers keep
    meter = SimulatedMeter(replace(profiles.get("rtx-4090"), multiprocessors=1))
    with meter.operators():
        setup = schemes.build(spec).apply(meter.adopt(setup_of("exact", (activation, activation))))
    with meter.active():
        step = TrainStep(setup, meter.place(rows()))
    reading = meter.memory(step)
    assert reading.estimated is not None
    return reading.activation_bytes, reading.peak_bytes, reading.estimated.step_seconds


@functools.cache
def kept(spec: str, activations: Activations) -> int:
    """Return the bytes that wait for the backward pass on a card."""
    with simulated(profiles.get("rtx-4090")):
        return inspection.trace(setup_of(spec, activations), rows).total_bytes


def exclude_each_other(first: str, second: str) -> bool:
    return any({first, second} <= each for each in EXCLUSIVE)


def quick_or_slow(first: str, second: str) -> Any:
    """Return a pair for a test: of those of which one is bound around the other, one of six is quick."""
    around = [pair for pair in PAIRS if AROUND & set(pair) and "invact" not in pair]
    is_quick = (first, second) in around and around.index((first, second)) % 6 == 0
    return pytest.param(first, second, marks=[] if is_quick else [pytest.mark.sampled(slow=15)])


@pytest.mark.parametrize(("first", "second"), [quick_or_slow(*pair) for pair in PAIRS if not exclude_each_other(*pair)])
def test_each_of_two_schemes_on_one_block_acts(first: str, second: str) -> None:
    activation = activation_for(first, second)

    both = read(f"{at(first, '2')}+{at(second, '2')}", activation)

    assert both != read(at(first, "2"), activation), f"{second} does nothing beside {first}"
    assert both != read(at(second, "2"), activation), f"{first} does nothing beside {second}"


@pytest.mark.parametrize(("first", "second"), [pair for pair in PAIRS if exclude_each_other(*pair)])
def test_two_schemes_that_exclude_each_other_are_refused_by_name_on_one_block(first: str, second: str) -> None:
    activation = activation_for(first, second)
    with pytest.raises(ConversionError, match=rf"\b{first}\b.* and .*\b{second}\b|\b{second}\b.* and .*\b{first}\b"):
        setup_of(f"{at(first, '2')}+{at(second, '2')}", (activation, activation))


@pytest.mark.parametrize("name", of_parts())
def test_compile_takes_what_can_be_compiled_on_the_same_block_and_refuses_the_rest_by_name(name: str) -> None:
    spec, activation = f"compile,only=2+{at(name, '2')}", activation_for(name)
    if name in COMPILED:
        alone, both = (setup_of(each, (activation, activation)) for each in (at(name, "2"), spec))
        assert len(both.sites) == len(alone.sites) + 1
        assert CompiledForward.of(both.module[2])  # type: ignore[index]
        return
    with pytest.raises(
        ConversionError, match=r"^compile:0.5,only=2: .* cannot be compiled: .*leave out compile or the other scheme"
    ):
        setup_of(spec, (activation, activation))


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(*pair, marks=pytest.mark.sampled(slow=40) if place % 8 else ()) for place, pair in enumerate(PAIRS)],
)
def test_two_schemes_on_two_blocks_stand(first: str, second: str) -> None:
    activations = (activation_for(first), activation_for(second))

    both = kept(f"{at(first, '1')}+{at(second, '2')}", activations)

    assert both not in (kept(at(first, "1"), activations), kept(at(second, "2"), activations))


@pytest.mark.sampled(fast=4, slow=4)
@pytest.mark.parametrize("name", IN_A_SECOND_RUN)
@pytest.mark.parametrize("recomputing", ["checkpoint", "selective"])
def test_layers_of_a_recomputed_block_lower_what_its_second_run_takes_and_nothing_that_waits(
    recomputing: str, name: str
) -> None:
    activation = activation_for(name)

    both, alone = read(f"{at(recomputing, '2')}+{at(name, '2')}", activation), read(at(recomputing, "2"), activation)

    assert alone[0] <= both[0] < alone[0] + SMALL
    assert both[1] < alone[1]


@pytest.mark.sampled(fast=15, slow=5)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("hooks", ["coat", "gact:L1", "offload"])
def test_the_contract_of_recomputed_blocks_whose_inputs_are_packed(hooks: str, part: str) -> None:
    check_scheme(f"checkpoint,only=h.[0-1]+{hooks},only=h.[0-1]", batch_size=2, parts=[part])
