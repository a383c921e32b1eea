"""A step whose operators are recalled is the step whose operators all run: the same events, to the byte."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Self

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.measuring import bench
from actbench.measuring.meters.peak import Event
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator import simulated
from actbench.simulator.cachingmode import OpCache, starting_from

SLOW = pytest.mark.sampled(slow=2)
TINY: dict[str, dict[str, Any]] = {
    "tiny-roberta": {"sequence_length": 16},
    "tiny-llama@num_hidden_layers=3": {"sequence_length": 24},
    "resnet-cifar": {},
}
ALL = tuple(TINY)
TEXT = ALL[:2]
PROFILES = ("cpu", "a100-40gb")
OTHERS = {"cpu": "a100-40gb", "a100-40gb": "cpu"}


def measured(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Measurement, list[Sequence[Event]]]:
    """Return what a case measures, and what its step allocates and frees, in order."""
    runs: list[list[Sequence[Event]]] = []
    read = simulated._read

    def noted(*args: Any) -> Any:
        reading, run = read(*args)
        runs.append(run)
        return reading, run

    with monkeypatch.context() as patched:
        patched.setattr(simulated, "_read", noted)
        found = bench.Session(case).memory()
    return found, runs[0]


def in_order(events: Sequence[Event]) -> list[Any]:
    """Return events with those that are freed in a row sorted: autocast frees its copies of weights by address."""
    return [event for freed, run in groupby(events, is_freed) for event in (sorted(run) if freed else run)]


def is_freed(event: Event) -> bool:
    return event[1] == 0


def rows() -> list[Any]:
    schemes: dict[str, tuple[str, ...]] = {
        "exact": ALL,
        "gact:L2": ALL,
        "actnn:L3": ALL,
        "checkpoint": TEXT,
        "selective": TEXT,
        "offload": ALL,
        "encode:bf16": ALL,
        "smaq": ALL,
        "fewbit:3": TEXT,
        "randomized:0.5": TEXT,
        "dropit:0.25": ALL,
        "velora:8": TEXT,
        "wtacrs:0.5": TEXT,
        "mesa": TEXT,
        "backrazor:0.25": TEXT,
        "float8:rowwise": TEXT,
        "coat": TEXT,
        "division": ALL,
        "lora:4": TEXT,
        "lora:4,adapter=dora": ALL[1:2],
        "hyclora:4": TEXT,
        "prac:0.5": ALL,
        "adam_mini": ALL,
        "galore:8": TEXT,
        "chunked_loss:8,keep_logits=true": ALL[1:2],
        "adam8bit": ALL,
        "optimizer_offload": ALL,
        "release": ALL,
        "accumulate:2": ALL,
        "autocast:bfloat16": TEXT,
        "chunked_loss:8": ALL[1:2],
        "tiled_mlp:4+checkpoint": ALL[1:2],
        "qlora:4+checkpoint+chunked_loss:8": ALL[1:2],
    }
    fast = {("fewbit:3", ALL[0], "cpu")}
    return [
        pytest.param(scheme, model, profile, turn % 3 == 0, marks=() if (scheme, model, profile) in fast else SLOW)
        for turn, (scheme, models) in enumerate(schemes.items())
        for model in (models if scheme == "exact" or len(models) == 1 else (TEXT[turn % 2], *models[2:]))
        for profile in profiles_of(models, turn // 2 + ALL.index(model))
    ]


def profiles_of(models: Sequence[str], turn: int) -> Sequence[str]:
    """Return both profiles for a scheme with one model; models of text and profiles are otherwise taken in turn."""
    return PROFILES if len(models) == 1 else (PROFILES[turn % 2],)


class RunsAll(FakeTensorMode):  # type: ignore[misc]
    """Runs every operator; copies of its tensors, as peft makes them of a classifier, are its own, too."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self


@functools.cache
def known_of(model: str, profile: str) -> OpCache:
    """Return what the exact model's operators did."""
    case = Case(model=model, batch_size=4, meter="simulated", device_profile=profile, **TINY[model])
    known: OpCache = {}
    with starting_from(known):
        bench.Session(case).memory()
    return known


@pytest.mark.parametrize(("scheme", "model", "profile", "is_alone"), rows())
def test_events_and_bytes_are_those_of_a_step_in_which_every_operator_runs(
    scheme: str, model: str, profile: str, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what cases of another device ran must change nothing, too
    known = {} if is_alone else known_of(model, OTHERS[profile])
    case = Case(model=model, scheme=scheme, batch_size=4, meter="simulated", device_profile=profile, **TINY[model])
    with starting_from({**known}):
        recalled = measured(case, monkeypatch)
    monkeypatch.setattr(simulated, "fake_mode", lambda: RunsAll(allow_non_fake_inputs=True))

    (reading, events), (expected, all_run) = recalled, measured(case, monkeypatch)
    assert reading == expected
    assert [in_order(part) for part in events] == [in_order(part) for part in all_run]


def test_a_copied_classifier_needs_what_it_needs_on_the_machine() -> None:
    case = Case(model="tiny-roberta", scheme="lora:4", batch_size=4, sequence_length=16, gradient_quality=False)

    real = bench.measure(case.model_copy(update={"meter": "cpu"}))
    found = bench.measure(case.model_copy(update={"meter": "simulated", "device_profile": "cpu"}))

    weights_of_a_copy = 64 * 64 * 4
    assert found.peak_bytes == pytest.approx(real.peak_bytes, abs=weights_of_a_copy / 16)
