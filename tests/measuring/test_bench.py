"""Measuring a case: the simulation against the allocator on converted models, and what a session reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actbench import scheme as schemes
from actbench.errors import (
    ConversionError,
    IdleError,
    ModelError,
    NothingToConvertError,
    OutOfMemoryError,
    SpecError,
    UntraceableError,
)
from actbench.measuring import bench
from actbench.measuring.gradients import gradients_of, relative_error_and_cosine
from actbench.methods.actnn import bitallocation
from actbench.methods.formats.encoded.form import through
from actbench.model.records import Case
from actbench.scheme.facets import Adaptive

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
QUICK = [("roberta", "fewbit:3+randomized:0.2+checkpoint")]


def case(spec: str, **fields: object) -> Case:
    return Case.model_validate({"scheme": spec, "batch_size": 4, "gradient_quality": False, **fields})


@pytest.mark.parametrize(
    ("name", "spec"),
    [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.sampled(slow=1)) for pair in PAIRS],
)
def test_the_simulated_peak_is_that_of_the_allocator(name: str, spec: str) -> None:
    simulated = bench.Session(case(spec, **MODELS[name], meter="simulated", device_profile="cpu")).memory()
    measured = bench.Session(case(spec, **MODELS[name], meter="cpu")).memory()

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=TOLERANCE)
    assert simulated.weights_bytes == measured.weights_bytes
    assert simulated.gradients_bytes == measured.gradients_bytes
    assert simulated.optimizer_bytes == measured.optimizer_bytes


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_gradient_quality_is_unknown_where_a_second_gradient_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(bench, "gradients_of", full)
    measured = bench.Session(case("fewbit:3", **MODELS["vit"], meter="cpu", gradient_quality=True)).memory()
    assert measured.gradient_error is None
    assert any("gradient quality is unknown" in warning for warning in measured.warnings)


@pytest.mark.exhaustive
def test_the_largest_batch_is_proved_on_both_sides() -> None:
    fields = {**MODELS["roberta"], "meter": "simulated", "memory_limit_bytes": 64 * 2**20}
    found = bench.Session(case("exact", **fields, find_largest_batch=True)).memory().largest_batch_search
    assert found is not None

    fits = bench.Session(case("exact", **{**fields, "batch_size": found.batch_size})).memory()

    assert fits.peak_bytes == found.fits_peak_bytes
    assert fits.fits
    over = bench.Session(case("exact", **{**fields, "batch_size": found.batch_size + 1})).memory()
    assert not over.fits
    assert over.peak_bytes == found.next_peak_bytes


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_measured_with_what_it_needs() -> None:
    fields = {**MODELS["roberta"], "meter": "simulated", "device_profile": "cpu"}
    free = bench.Session(case("exact", **fields)).memory()
    over = bench.Session(case("exact", **fields, memory_limit_bytes=2**20)).memory()

    assert (over.memory_limit_bytes, over.over_limit_bytes) == (2**20, free.peak_bytes - 2**20)
    assert (free.fits, over.fits) == (True, False)
    changed = {"memory_limit_bytes": free.memory_limit_bytes, "over_limit_bytes": None}
    assert over.model_copy(update=changed) == free


def test_memory_that_runs_out_is_a_failure_with_the_part_of_the_step() -> None:
    failure = bench.failure_of(OutOfMemoryError("no room", "backward"))

    assert (failure.reason, failure.phase, failure.peak_bytes) == ("out-of-memory", "backward", None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out-of-memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out-of-memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"), "out-of-memory"),
        (RuntimeError("std::bad_alloc"), "out-of-memory"),
        (RuntimeError("CUDA error: out of memory"), "out-of-memory"),  # of the driver, outside of torch's allocator
        (NothingToConvertError("nothing"), "nothing-converted"),
        (IdleError("nothing runs"), "nothing-converted"),
        (ConversionError("not together"), "unsupported"),
        (SpecError("wrong"), "unsupported"),
        (ZeroDivisionError("oops"), "crash"),
    ],
)
def test_every_error_has_a_reason(error: BaseException, reason: str) -> None:
    assert bench.failure_of(error).reason == reason


def test_an_error_in_ones_own_model_tells_its_line(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Linear(2, 3), lambda n: {'x': torch.zeros(n, 2)}, lambda m, b: m(b['x'].view(-1, 3))\n"
        "def many():\n"
        "    return torch.nn.Linear(2, 3), lambda n: {'x': torch.zeros(n, 2)}, lambda m, b: m(b['x'])\n"
    )
    with pytest.raises(RuntimeError) as wrong:
        bench.Session(case("exact", model=f"{own}:build", meter="cpu")).memory()
    assert bench.failure_of(wrong.value).message.endswith(f" ({own}:3)")

    with pytest.raises(ModelError, match=r"the loss is a tensor of shape \(4, 3\); it must be one number"):
        bench.Session(case("exact", model=f"{own}:many", meter="cpu")).memory()


def test_measure_times_as_many_steps_as_asked() -> None:
    measured = bench.measure(case("exact", **MODELS["vit"], meter="cpu", min_steps=3, min_seconds=0.0, warmup_steps=1))

    assert measured.step_seconds is not None
    assert len(measured.step_seconds) == 3


@pytest.mark.exhaustive
def test_gradients_are_judged_once_bits_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def errors() -> list[float | None]:
        fields = {**MODELS["vit"], "meter": "cpu", "gradient_quality": True}
        return [bench.Session(case("actnn:L3", **fields, seed=seed)).memory().gradient_error for seed in range(6)]

    shared_out = errors()
    adaptive = schemes.build("checkpoint+actnn:L3").facet(Adaptive)
    assert adaptive is not None
    assert adaptive.by_first_step
    monkeypatch.setattr("actbench.methods.actnn.scheme.ActNN.facets", ())
    at_first = errors()

    # of single draws up to 1.04, over six 0.90
    assert sum(filter(None, shared_out)) < 0.95 * sum(filter(None, at_first))


@pytest.mark.slow
def test_a_sketch_says_how_its_variance_compares_with_the_formula() -> None:
    fields = {**MODELS["gpt2"], "meter": "cpu", "gradient_quality": True}
    sketched = bench.Session(case("randomized:0.2,sketch=rows_distinct+checkpoint", **fields)).memory()
    fewbit = bench.Session(case("fewbit:3", **fields)).memory()

    assert sketched.diagnostic("sketch_variance_predicted") is not None
    assert sketched.diagnostic("sketch_variance_observed") is not None
    assert sketched.diagnostic("sgd_variance") is not None
    assert 0.5 < sketched.diagnostic("sketch_variance_observed") / sketched.diagnostic("sketch_variance_predicted") < 2
    assert fewbit.diagnostic("sketch_variance_predicted") is None
    assert (
        bench.Session(case("randomized:0.2", **MODELS["gpt2"], meter="cpu")).memory().diagnostic("sgd_variance") is None
    )


BUILD = """
import torch
from torch import nn

class Looks(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum().item() < 1e9 else x / 2)

def build():
    model = nn.Sequential(Looks(8, 8), nn.GELU(), nn.Linear(8, 1))
    return model, lambda n: {"x": torch.randn(n, 8)}, lambda m, b: m(b["x"]).square().mean()

def recurrent():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]
    return Last(8, 8), lambda n: {"x": torch.randn(n, 3, 8)}, lambda m, b: m(b["x"]).square().mean()
"""


def test_a_model_that_needs_values_is_measured_on_a_device_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BUILD)
    fields = {"model": f"{tmp_path}/own.py:build"}

    measured = bench.Session(case("fewbit:3", **fields, meter="cpu")).memory()

    assert [site.path for site in measured.sites] == ["1"]
    assert any("looks at the values" in warning for warning in measured.warnings)
    with pytest.raises(UntraceableError):
        bench.Session(case("fewbit:3", **fields, meter="simulated"))


def test_recurrent_layers_are_not_simulated_for_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BUILD)

    with pytest.raises(UntraceableError, match="Last"):
        bench.Session(case("exact", model=f"{tmp_path}/own.py:recurrent", meter="simulated", device_profile="cpu"))


@pytest.mark.exhaustive
def test_a_start_that_does_not_fit_still_tells_the_largest_batch() -> None:
    limit = {"memory_limit_bytes": 64 * 2**20, "find_largest_batch": True}

    fields = {**MODELS["roberta"], "batch_size": 4096, "meter": "simulated"}
    found = bench.Session(case("exact", **fields, **limit)).memory()

    assert found.over_limit_bytes is not None
    assert 0 < found.largest_batch < 4096


@pytest.mark.slow
def test_bits_reach_the_judged_step_however_late_the_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device it is by luck whether the costs have come to the host when a step looks for them."""

    class Late:
        there = False

        def query(self) -> bool:
            return self.there

        def synchronize(self) -> None:
            self.there = True

    monkeypatch.setattr("actbench.methods.actnn.scheme.ActNN.facets", ())  # steps that take long
    fields = {**MODELS["vit"], "meter": "cpu", "gradient_quality": True}
    in_time = bench.Session(case("actnn:L3", **fields)).memory()
    monkeypatch.setattr(bitallocation, "_recorded", lambda device: Late())
    late = bench.Session(case("actnn:L3", **fields)).memory()

    assert late.gradient_error == in_time.gradient_error
    assert late.activation_bytes == in_time.activation_bytes


@pytest.mark.parametrize(
    "scheme", ["encode:int:4,on=weights", pytest.param("smaq,on=weights+fewbit:3", marks=pytest.mark.slow)]
)
def test_weights_in_a_format_are_judged_as_a_step_leaves_them(scheme: str) -> None:
    fields = {**MODELS["vit"], "meter": "cpu", "gradient_quality": True}
    session = bench.Session(case(scheme, **fields))
    before = {name: value.clone() for name, value in session.setup.module.state_dict().items()}
    by_hand = bench.Session(case("exact", **fields))
    exact = gradients_of(by_hand.setup, by_hand._batch(), 0)
    if "fewbit" in scheme:
        by_hand.setup = schemes.build("fewbit:3").apply(by_hand.setup)
    torch.manual_seed(0)
    number_format = schemes.build(next(part for part in scheme.split("+") if "weights" in part))._unbiased
    with torch.no_grad():
        for parameter in by_hand.setup.module.parameters():
            if parameter.dim() > 1 and parameter.numel() >= 64:
                parameter.copy_(through(parameter, number_format))
    expected = relative_error_and_cosine(gradients_of(by_hand.setup, by_hand._batch(), 0), exact)

    judged = session._judged_gradient()
    assert judged is not None
    assert all(torch.equal(value, before[name]) for name, value in session.setup.module.state_dict().items())
    found = session.memory()
    assert found.gradient_error is not None
    assert found.gradient_error > 0.001
    assert (found.gradient_error, found.gradient_cosine) == expected


@pytest.mark.slow
def test_a_timeline_is_there_where_it_is_asked_for() -> None:
    tiny = case("checkpoint", model="tiny-gpt2", sequence_length=16)

    plain, told = bench.measure(tiny), bench.measure(tiny, timeline=True)

    assert plain.timeline is None
    assert told.timeline is not None
    assert told.timeline.peak_bytes == told.peak_bytes == plain.peak_bytes
    assert bench.snapshot(tiny).startswith(b"\x80\x04")  # a pickle of protocol 4
