from __future__ import annotations

import pytest

from actbench.errors import UsageError
from actbench.run.recipes.sections import parse_batch_range


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", (8,)),
        ("8,16", (8, 16)),
        ("16, 8", (16, 8)),
        ("8-512*2", (8, 16, 32, 64, 128, 256, 512)),
        ("8-100*3", (8, 24, 72)),
        ("8-32+8", (8, 16, 24, 32)),
        ("8-30+8", (8, 16, 24)),
        ("5-5+1", (5,)),
        ("1,4-8+2,64", (1, 4, 6, 8, 64)),
    ],
)
def test_batch_sizes_are_read(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_batch_range(text) == sizes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "batch size '': write a number (8), a list (8,16) or a range (8-32+8, 8-512*2)"),
        ("0", "batch size '0': a size is at least 1"),
        ("-8", "write a number (8), "),
        ("8.5", "write a number (8), "),
        ("8,,16", ", and not ''"),
        ("8-512", "write a number (8), "),
        ("8-512/2", "write a number (8), "),
        ("²", "write a number (8), "),
        ("0-8+1", "begins at 1 or more"),
        ("16-8+1", "ends at its beginning or after it"),
        ("8-16*1", "never ends with the step *1"),
        ("8-16*0", "never ends with the step *0"),
        ("8-16+0", "never ends with the step +0"),
        ("8,8", "holds the same size twice"),
        ("8,4-8+4", "holds the same size twice"),
        ("1-1000000000+1", "spans more than 1,000 sizes"),
    ],
)
def test_what_is_no_batch_size_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_batch_range(text)

    assert told in str(caught.value)
    assert f"batch size {text!r}" in str(caught.value)
