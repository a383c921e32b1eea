"""What compile cannot do is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compilednets import EAGER, compiled, forward_of, setup_of, transformer
from torch import nn

import actbench
from actbench import scheme as schemes
from actbench.errors import ConversionError, MeasurementError, NothingToConvertError, UntraceableError
from actbench.methods.compile import partition

pytestmark = pytest.mark.usefixtures("alone")


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
