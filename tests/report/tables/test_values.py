from __future__ import annotations

import math

import pytest

from actbench.report.tables.values import Unit, Value, write


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3 * 1024**3, "bytes", "3.00 GiB"),
        (0.0123, "seconds", "12.3 ms"),
        (0.1384, "share", "13.8 %"),
        (-0.0001, "share", "0.0 %"),
        (0.05, "change", "+5.0 %"),
        (-0.0004, "change", "+0.0 %"),
        (1.5, "ratio", "1.50x"),
        (1000.0, "ratio", "1000.00x"),
        (2075425.0, "ratio", ">1000x"),
        (1000.0, "reduction", "1000.00x"),
        (2075425.0, "reduction", "all"),
        (0.15, "difference", "+0.15"),
        (-0.15, "difference", "-0.15"),
        (-0.0, "difference", "+0"),
        (72.727, "rate", "72.7"),
        (7272.7, "rate", "7,273"),
        (128, "count", "128"),
        (128.0, "count", "128"),
        (0.99999, "number", "1"),
        (0.000012345, "number", "1.234e-05"),
        (math.nan, "number", "nan"),
        (math.inf, "bytes", "inf"),
        (True, "flag", "yes"),
        (False, "flag", ""),
        (None, "flag", ""),
        (None, "text", ""),
        (None, "bytes", "–"),
        ("tiny", "text", "tiny"),
    ],
)
def test_each_kind_of_value_is_written_its_own_way(value: Value, unit: Unit, text: str) -> None:
    assert write(value, unit) == text
