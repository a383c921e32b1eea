"""The advice for a peak goes by its phase, what fills it, and what the case can still take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from peakparts import ACTIVATIONS, STATE

from actbench.model.advice import advice
from actbench.model.measured import MeasuredRecord, Measurement, PeakParts
from actbench.model.records import Built, Unreached
from actbench.model.scripts import Script
from actbench.report.advice import about_limit, about_peak
from actbench.units import GIB

MakeRecord = Callable[..., MeasuredRecord]


def measured(phase: str | None, parts: PeakParts | None, peak_bytes: int = 5 * GIB) -> Measurement:
    return Measurement(weights_bytes=1, activation_bytes=1, peak_bytes=peak_bytes, peak_phase=phase, peak_parts=parts)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (measured(None, None), None),
        (measured("backward", None), "the peak is in the backward pass; take a smaller --batch-size"),
        (measured("optimizer", None), "the peak is in the optimizer step; take another --optimizer"),
        (measured("backward", STATE), "pass, 80 % of it weights, gradients and optimizer state; take another --optimi"),
        (measured("forward", ACTIVATIONS, 40 * GIB), "forward pass, 95 % of it saved activations; take a smaller --ba"),
    ],
)
def test_the_advice_goes_by_the_phase_and_what_fills_it(found: Measurement, expected: str | None) -> None:
    told = about_peak(found)

    assert told is None if expected is None else expected in (told or "")


def test_weights_that_a_scheme_leaves_whole_are_named_if_they_fill_the_peak() -> None:
    left = (Unreached(path="layers.0.experts", kind="MixtralExperts", reason="a reason", weights_bytes=3 * GIB),)
    found = measured("forward", STATE).model_copy(update={"unreached": left})
    assert "the scheme leaves the weights of MixtralExperts whole: spread them over" in (about_peak(found) or "")
    assert "another --optimizer" not in (about_peak(found) or "")
    small = found.model_copy(update={"peak_bytes": 7 * GIB})
    assert "another --optimizer" in (about_peak(small) or "")


def test_the_advice_names_schemes_that_the_case_does_not_use_yet(make_record: MakeRecord) -> None:
    found = measured("backward", None).model_copy(update={"remedies": ("checkpoint", "chunked_loss", "offload")})
    used = make_record("checkpoint:2,every=4+offload").case

    assert (about_peak(found, make_record().case) or "").endswith(
        "loss, such as checkpoint or chunked_loss or offload (see 'actbench schemes')"
    )
    assert (about_peak(found, used) or "").endswith("loss, such as chunked_loss (see 'actbench schemes')")


@pytest.mark.parametrize(
    ("phase", "built", "expected"),
    [
        ("backward", Built(model_class="Net", batch_size=8), "take a smaller --batch-size, or a --scheme"),
        ("backward", Built(model_class="Net"), "take a smaller batch in the script, or a --scheme"),
        ("optimizer", Built(model_class="Net", batch_size=8), "take another optimizer in the script, or a --scheme"),
    ],
)
def test_the_advice_for_a_script_is_what_it_can_take(
    make_record: MakeRecord, phase: str, built: Built, expected: str
) -> None:
    record = make_record(
        model="train.py",
        script=Script(target="train.py"),
        built=built,
        peak_phase=phase,
        memory_limit_bytes=10,
        over_limit_bytes=5,
    )
    outcome = record.outcome.model_copy(update={"memory_limit_bytes": 10})

    assert expected in (about_limit(record.model_copy(update={"outcome": outcome})) or "")


def test_schemes_are_found_by_what_they_change() -> None:
    asked: list[tuple[str, ...]] = []

    def find(changes: tuple[str, ...]) -> list[str]:
        asked.append(tuple(changes))
        return ["one", "two"]

    told = advice("optimizer", mostly_model=False, find=find)
    assert told.endswith("changes optimizer or gradients: one, two")
    assert asked == [("optimizer", "gradients")]
