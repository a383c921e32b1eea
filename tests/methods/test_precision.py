"""The types of a step: schemes and flags say the same, once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.measuring.bench import Session
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.tools.convert import model as conversion


def case_of(spec: str, **fields: Any) -> Case:
    case = {"model": "tiny-roberta", "batch_size": 4, "sequence_length": 32, "meter": "cpu", "scheme": spec, **fields}
    return Case.model_validate(case)


@functools.cache
def measured(spec: str, **fields: Any) -> Any:
    return Session(case_of(spec, **fields)).memory()


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        ("autocast:bf16", {"autocast": "bf16"}),
        ("autocast:fp16", {"autocast": "fp16"}),
        ("pure:bf16", {"dtype": "bf16"}),
    ],
)
def test_the_scheme_does_what_the_flag_does(spec: str, flags: dict[str, str]) -> None:
    by_scheme, by_flag, exact = measured(spec), measured("exact", **flags), measured("exact")

    assert by_scheme.peak_bytes == by_flag.peak_bytes < exact.peak_bytes
    assert (by_scheme.dtype, by_scheme.weights_bytes, by_scheme.optimizer_bytes) == (
        by_flag.dtype, by_flag.weights_bytes, by_flag.optimizer_bytes
    )  # fmt: skip
    assert 0 < by_scheme.gradient_error < 0.05


@pytest.mark.sampled(slow=1)
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flags below, whatever they are
@pytest.mark.parametrize("spec", ["autocast:bf16", "pure:bf16"])
def test_both_meters_see_the_same_peak(spec: str) -> None:
    simulated = measured(spec, meter="simulated", device_profile="cpu")

    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's products in bfloat16 take workspaces on some processors
        real = Session(case_of(spec)).memory()

    assert simulated.peak_bytes == real.peak_bytes


def test_pure_casts_parameters_buffers_gradients_and_inputs_and_keeps_their_identity() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    parameters = list(module.parameters())
    module(torch.ones(2, 1, 4, 4)).sum().backward()
    setup = TrainingSetup(
        module, lambda module, batch: module(batch["x"][0]).sum(), lambda m: torch.optim.SGD(m.parameters())
    )

    changed = schemes.build("pure").apply(setup)
    step = TrainStep(changed, {"x": [torch.ones(2, 1, 4, 4)], "y": torch.ones(2, dtype=torch.long)})
    step()

    assert [id(parameter) for parameter in changed.module.parameters()] == [id(parameter) for parameter in parameters]
    assert {t.dtype for t in module.state_dict().values()} == {torch.bfloat16, torch.int64}
    assert step.batch["x"][0].dtype == torch.bfloat16
    assert step.batch["y"].dtype == torch.int64


@pytest.mark.parametrize(("spec", "are_numbers"), [("pure:fp16", False), ("pure:bf16", True)])
def test_what_adam_makes_of_small_gradients_is_warned_of(spec: str, *, are_numbers: bool) -> None:
    setup = TrainingSetup(
        nn.Linear(8, 4),
        lambda module, batch: module(batch["x"]).mean() / 1000,
        lambda m: torch.optim.AdamW(m.parameters()),
    )

    changed = schemes.build(spec).apply(setup)
    TrainStep(changed, {"x": torch.ones(2, 8)})()

    assert all(bool(parameter.isfinite().all()) for parameter in changed.module.parameters()) == are_numbers
    assert any("updates can be NaN" in warning for warning in changed.warnings) != are_numbers


@pytest.mark.parametrize(
    ("spec", "flags"),
    [("autocast:fp16", {"autocast": "bf16"}), ("pure:bf16", {"dtype": "fp16"}), ("pure:bf16", {"autocast": "bf16"})],
)
def test_contradictions_are_refused(spec: str, flags: dict[str, str]) -> None:
    with pytest.raises(ConversionError, match=r"once|leave one out"):
        measured(spec, **flags)


@pytest.mark.slow
def test_the_same_said_twice_is_fine() -> None:
    twice = {"autocast:bf16": {"autocast": "bf16"}, "pure:bf16": {"dtype": "bf16"}}
    for spec, flags in twice.items():
        found, once = (Session(case_of(spec, **each)).setup for each in (flags, {}))
        assert found.precision == once.precision
        assert [p.dtype for p in found.module.parameters()] == [p.dtype for p in once.module.parameters()]


def test_names_are_long_in_specifications_and_wrong_ones_are_refused() -> None:
    assert schemes.build("autocast:fp16").spec == schemes.build("autocast:float16").spec == "autocast:float16"
    assert schemes.build("pure:bf16") == schemes.build("pure:bfloat16") == schemes.build("pure")
    with pytest.raises(SpecError, match="fp8"):
        schemes.build("autocast:fp8")
    with pytest.raises(SpecError, match="both set the dtype"):
        schemes.build("autocast+pure")


@pytest.mark.parametrize("spec", ["autocast", "pure"])
def test_a_model_alone_cannot_carry_it(spec: str) -> None:
    with pytest.raises(ConversionError, match=r"autocast|the type of inputs"):
        conversion.convert(nn.Linear(2, 2), spec)
    with pytest.raises(ConversionError, match="has no"):
        conversion.convert(nn.Flatten(), spec)
