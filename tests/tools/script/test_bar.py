"""The peak of a step as a bar, with the limit marked."""

from __future__ import annotations

from typing import Any

import pytest

from actbench.model.measured import Measurement, PeakParts
from actbench.tools.script.answers.bar import peak_bar
from actbench.units import GIB


def measured(**fields: Any) -> Measurement:
    parts = PeakParts(weights_bytes=2 * GIB, activation_bytes=7 * GIB, temporary_bytes=GIB)
    usual = {"weights_bytes": 2 * GIB, "activation_bytes": 0, "peak_bytes": 10 * GIB, "peak_parts": parts}
    return Measurement(**usual | fields)


@pytest.mark.parametrize(
    ("fields", "drawn"),
    [
        ({}, "wwwwssssssssssssss" + "tt"),
        ({"memory_limit_bytes": 5 * GIB}, "wwwwssssss|sssssssstt"),
        ({"memory_limit_bytes": 20 * GIB}, "wwsssssss" + "t" + " " * 10 + "|"),
        ({"reserved_bytes": 20 * GIB, "memory_limit_bytes": 20 * GIB}, "wwssssssst" + "_" * 10 + "|"),
    ],
)
def test_a_bar_is_as_long_as_what_is_needed_or_the_limit(fields: dict[str, Any], drawn: str) -> None:
    _, bar, *_ = peak_bar(measured(**fields), 21, coloured=False)

    assert bar.plain == drawn


def test_the_legend_names_the_parts_the_largest_first(make_record: Any) -> None:
    title, bar, *legend = peak_bar(measured(peak_phase="forward", memory_limit_bytes=5 * GIB), 60, coloured=True)

    assert title.plain == "The peak of a step, 10.00 GiB in the forward pass; | is the limit of 5.00 GiB:"
    assert set(bar.plain) == {"█", "|"}
    assert [line.plain for line in legend] == [
        "█ saved tensors 7.00 GiB   █ weights 2.00 GiB",
        "█ temporaries 1.00 GiB",
    ]
    assert peak_bar(measured(peak_parts=None), 60, coloured=True) == []
