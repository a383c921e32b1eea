"""Measuring a case: the simulation against the allocator on converted models, and what a session reads."""

from __future__ import annotations

import pytest
import torch

from actbench import bench
from actbench.errors import ConversionError, OutOfMemoryError, SpecError
from actbench.records import Case

TOLERANCE = 0.02
WIDE = "hidden_size=128,intermediate_size=512"
MODELS = {
    "resnet18": {"model": "resnet18", "image_size": 64},
    "roberta": {"model": f"tiny-roberta@{WIDE}", "sequence_length": 64, "attention": "eager"},
    "gpt2": {"model": "tiny-gpt2@hidden_size=128", "sequence_length": 64},
    "vit": {"model": f"tiny-vit@{WIDE}"},
}
SCHEMES = ("exact", "fewbit:3", "randomized:0.2", "checkpoint", "offload", "fewbit:3+randomized:0.2+checkpoint")
PAIRS = [(name, spec) for name in MODELS for spec in SCHEMES if not (name == "resnet18" and "fewbit" in spec)]


def case(spec: str, **fields: object) -> Case:
    return Case.model_validate({"scheme": spec, "batch_size": 4, "gradient_quality": False, **fields})


@pytest.mark.parametrize(("name", "spec"), PAIRS)
def test_the_simulated_peak_is_that_of_the_allocator(name: str, spec: str) -> None:
    simulated = bench.Session(case(spec, **MODELS[name], meter="simulated", device_profile="cpu")).memory()
    measured = bench.Session(case(spec, **MODELS[name], meter="cpu")).memory()

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=TOLERANCE)
    assert simulated.weights_bytes == measured.weights_bytes
    assert simulated.gradients_bytes == measured.gradients_bytes
    assert simulated.optimizer_bytes == measured.optimizer_bytes


def test_gradient_quality_is_of_the_scheme_and_not_of_the_dropout() -> None:
    fields = {**MODELS["roberta"], "meter": "cpu", "gradient_quality": True}
    recomputed = bench.Session(case("checkpoint", **fields)).memory()
    coarse = bench.Session(case("fewbit:1", **fields)).memory()
    fine = bench.Session(case("fewbit:4", **fields)).memory()

    assert recomputed.gradient_error == 0.0
    assert recomputed.gradient_cosine == pytest.approx(1.0, abs=1e-6)
    assert fine.gradient_error is not None
    assert coarse.gradient_error is not None
    assert 0.0 < fine.gradient_error < coarse.gradient_error < 1.0


def test_the_largest_batch_is_proved_on_both_sides() -> None:
    fields = {**MODELS["roberta"], "meter": "simulated", "memory_limit_bytes": 64 * 2**20}
    found = bench.Session(case("exact", **fields, find_largest_batch=True)).memory().largest_batch_search
    assert found is not None

    fits = bench.Session(case("exact", **{**fields, "batch_size": found.batch_size})).memory()

    assert fits.peak_bytes == found.fits_peak_bytes
    with pytest.raises(OutOfMemoryError) as over:
        bench.Session(case("exact", **{**fields, "batch_size": found.batch_size + 1})).memory()
    assert over.value.peak_bytes == found.next_peak_bytes


def test_a_batch_that_does_not_fit_is_a_failure_with_the_peak_it_would_need() -> None:
    session = bench.Session(case("exact", **MODELS["roberta"], meter="simulated", memory_limit_bytes=2**20))

    with pytest.raises(OutOfMemoryError) as over:
        session.memory()
    failure = bench.failure_of(over.value)

    assert failure.reason == "out-of-memory"
    assert failure.peak_bytes is not None
    assert failure.peak_bytes > 2**20


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out-of-memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out-of-memory"),
        (ConversionError("nothing"), "nothing-converted"),
        (SpecError("wrong"), "unsupported"),
        (ZeroDivisionError("oops"), "crash"),
    ],
)
def test_every_error_has_a_reason(error: BaseException, reason: str) -> None:
    assert bench.failure_of(error).reason == reason


def test_measure_times_as_many_steps_as_asked() -> None:
    measured = bench.measure(case("exact", **MODELS["vit"], meter="cpu", min_steps=3, min_seconds=0.0, warmup_steps=1))

    assert measured.step_seconds is not None
    assert len(measured.step_seconds) == 3
