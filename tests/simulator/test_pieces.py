"""What it brings to cut the backward pass of a convolutional network into pieces, simulated and really."""

from __future__ import annotations

import pytest

from actbench.measuring.bench import Session
from actbench.model.records import Case


def peak(scheme: str, meter: str) -> int:
    profile = "cpu" if meter == "simulated" else None
    case = Case(
        model="resnet-cifar@depth=8",
        scheme=scheme,
        batch_size=32,
        meter=meter,
        device_profile=profile,
        gradient_quality=False,
    )
    return Session(case).memory().peak_bytes


@pytest.mark.slow
def test_pieces_lower_the_peak_as_simulated() -> None:
    simulated, measured = (
        {scheme: peak(scheme, meter) for scheme in ("actnn:L3", "actnn:L3,chunk=4")} for meter in ("simulated", "cpu")
    )

    assert measured["actnn:L3,chunk=4"] < 0.97 * measured["actnn:L3"]
    for scheme, bytes_ in measured.items():
        assert simulated[scheme] == pytest.approx(bytes_, rel=0.01)
