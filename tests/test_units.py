from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from actbench.errors import UsageError
from actbench.units import counted, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("16GiB", 16 * 1024**3),
        ("512 MB", 512 * 1000**2),
        ("1.5g", 1024**3 * 3 // 2),
        ("4096B", 4096),
        (" 2 tib ", 2 * 1024**4),
        ("3kB", 3 * 1000),
        ("7b", 7),
    ],
)
def test_amounts_are_read_in_binary_and_decimal_units(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    "text", ["", "GiB", "16", "0", "0.0GiB", "-1GiB", "16 potatoes", "nan", "inf", "1e3", "1,5GiB", "0.1"]
)
def test_what_is_no_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="is not an amount of memory"):
        parse_bytes(text)


@given(st.integers(min_value=1, max_value=2**60))
def test_whole_bytes_come_back(amount: int) -> None:
    assert parse_bytes(f"{amount}B") == pytest.approx(amount, rel=2**-52)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (3 * 1024**2 // 2, "1.50 MiB"),
        (1500 * 1024**3, "1,500.00 GiB"),
        (-2 * 1024, "-2.00 KiB"),
    ],
)
def test_bytes_are_written_with_the_unit_that_suits(amount: int, text: str) -> None:
    assert format_bytes(amount) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (7322, "2h 02m 02s"),
        (61.2, "1m 01s"),
        (59.9, "59.9 s"),
        (0.0123, "12.3 ms"),
        (4.5e-5, "45 µs"),
        (2e-9, "2 ns"),
        (0, "0 ns"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_seconds_are_written_with_the_unit_that_suits(amount: float, text: str) -> None:
    assert format_seconds(amount) == text


@pytest.mark.parametrize(("number", "told"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1024, "1,024 rows")])
def test_a_number_agrees_with_its_noun(number: int, told: str) -> None:
    assert counted(number, "row") == told
