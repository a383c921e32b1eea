"""What schemes say of their gradients, against gradients and against the committed records."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.report import kinds, store
from actbench.report.tabled import TabledRecord
from actbench.scheme import Scheme
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.testing import check_scheme

RESULTS = Path(__file__).parents[2] / "results"
NO_DROPOUT = "resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"


def worth_trying(scheme: type[Scheme], batch_size: int) -> tuple[str, ...]:
    return tuple(scheme.name + value for value in scheme.card.variants_for(batch_size))


SPECS = [
    spec
    for scheme in schemes.find_schemes().values()
    for spec in worth_trying(scheme, 4)
    if not {"parameters", "memory format"} & {*schemes.build(spec).changes}  # tests/methods/test_channelslast.py
]
EXACT = [spec for spec in SPECS if schemes.build(spec).gradient == "exact"]
UNBIASED = [spec for spec in SPECS if schemes.build(spec).gradient == "unbiased"]
APPROXIMATE = [spec for spec in SPECS if schemes.build(spec).gradient == "approximate"]


def language_model(spec: str = "exact") -> tuple[TrainingSetup, dict[str, Tensor]]:
    activation = "silu" if spec.startswith("resilu2") else "gelu_new"
    case = Case(model=f"tiny-gpt2@{NO_DROPOUT},activation_function={activation}", batch_size=4, sequence_length=16)
    workload = workloads.load_workload(case)
    return workload.setup(materialize=True, seed=0), dict(workload.batch(4, seed=0))


def gradient(setup: TrainingSetup, batch: dict[str, Tensor], seed: int = 0) -> Tensor:
    """Return the gradient of all parameters that waits for the optimizer's step."""
    torch.manual_seed(seed)
    step = TrainStep(setup, batch)
    step.hold()
    step.backward(step.forward())
    found = step.gradients()
    flat = torch.cat([found[p].detach().flatten().double() for p in setup.module.parameters() if p in found])
    setup.module.zero_grad()
    return flat


@functools.cache
def exact_gradient(like: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch and the gradient of the unchanged model that a scheme is tried on."""
    setup, batch = language_model(like)
    return batch, gradient(setup, batch)


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(  # of compile tests/methods/compile/test_compile.py has the gradients
    "spec", [pytest.param(spec, marks=[pytest.mark.slow] * spec.startswith("compile")) for spec in EXACT]
)
def test_what_says_exact_gives_the_exact_gradient(spec: str) -> None:
    check_scheme(spec, parts=["gradient"])


@pytest.mark.parametrize("spec", APPROXIMATE)
def test_what_says_approximate_gives_another(spec: str) -> None:
    batch, exact = exact_gradient("resilu2" if spec.startswith("resilu2") else "exact")
    changed, _ = language_model(spec)
    try:
        applied = schemes.build(spec).apply(changed)
    except ConversionError:  # regelu2 is for other functions than this GELU
        pytest.skip("not for this model")

    assert distance(gradient(applied, batch), exact) > 1e-5


@pytest.mark.sampled(fast=2, slow=8)
@pytest.mark.parametrize("spec", UNBIASED)
def test_what_says_unbiased_is_right_on_average(spec: str) -> None:
    check_scheme(spec, parts=["mean gradient"])


@pytest.mark.parametrize("spec", ["dropit:0.25", "gact:L1.2,stochastic=false"])
def test_the_same_number_of_draws_shows_a_bias(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = schemes.build(spec)
    assert scheme.gradient == "approximate"
    monkeypatch.setattr(type(scheme), "gradient", "unbiased")

    with pytest.raises(AssertionError, match="declared unbiased, and the mean gradient of 100 draws is "):
        check_scheme(scheme, parts=["mean gradient"])


def test_the_committed_records_say_the_same() -> None:
    records, _ = store.read_all(kinds.files_in([RESULTS]), TabledRecord)
    known = [
        (record.case.scheme, record.outcome.gradient_error)
        for record in records
        if isinstance(record.outcome, Measurement) and record.outcome.gradient_error is not None
    ]
    said = {spec: schemes.build(spec).gradient for spec, _ in known}

    assert {"exact", "unbiased", "approximate"} <= set(said.values())
    for spec, error in known:
        assert (error < 1e-5) == (said[spec] == "exact"), spec


def test_a_stack_is_as_good_as_the_worst_of_its_parts() -> None:
    assert schemes.build("checkpoint+chunked_loss:8").gradient == "exact"
    assert schemes.build("checkpoint+gact:L2").gradient == "unbiased"
    assert schemes.build("fewbit:4+randomized:0.2").gradient == "approximate"


OTHER_ALGORITHMS = {"adam_mini", "apollo", "fira", "galore", "muon8bit", "schedule_free"}
"""Schemes that train by another rule than Adam's: whoever wants one names it."""

SAVE_NOTHING = {"ema", "keep_outputs", "late_zero_grad", "master"}
"""Schemes that say what a loop holds."""

UNTIMED = {"compile", "liger"}
"""Schemes whose steps have no estimated time."""


def test_every_scheme_but_exact_has_something_worth_trying_that_builds_it() -> None:
    for name in schemes.alone():
        scheme = schemes.lookup(name)
        tried = [schemes.build(spec) for spec in worth_trying(scheme, 12)]
        assert (name in {"exact", *OTHER_ALGORITHMS, *SAVE_NOTHING, *UNTIMED}) == (not tried)
        assert {built.name for built in tried} <= {name}


def test_a_batch_is_cut_into_what_divides_it() -> None:
    (scheme,) = [
        each for each in schemes.find_schemes().values() if worth_trying(each, 1) == () != worth_trying(each, 2)
    ]

    assert worth_trying(scheme, 12) == tuple(f"{scheme.name}:{parts}" for parts in (2, 4, 12))
    assert worth_trying(scheme, 7) == (f"{scheme.name}:7",)
    assert worth_trying(scheme, 99_999_999_999) == ()
    assert worth_trying(scheme, 2**40)[-1] == f"{scheme.name}:{2**20}"
    assert [schemes.build(spec).spec for spec in worth_trying(scheme, 10**8)] == [
        f"{scheme.name}:{2**power}" for power in range(1, 9)
    ]
