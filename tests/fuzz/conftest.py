"""Fuzzing of everything that reads what others wrote: only errors of the project's own may come out."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

Fuzz = Callable[[st.SearchStrategy[Any], Callable[[Any], object]], None]

DEFAULT_EXAMPLES = 150
SLOW_EXAMPLES = 400
ALL_EXAMPLES = int(os.environ.get("ACTBENCH_FUZZ_EXAMPLES", "2_000"))

_NUMBERS = [0, 1, -1, 8, 2**63, 2**64, 10**400, 0.5, 1e308, 1e-320, float("inf"), float("nan"), True, None]
_TEXTS = [
    "",
    "8",
    "8-512*2",
    "fewbit:3",
    "tiny-vit",
    "resnet50",
    "16GiB",
    "=1+1",
    "\x1b[31m",
    "\u202e",
    "a" * 1000,
    "~x",
]
_NESTED: list[Any] = [[], {}, [1, [2, "a"]], {"a": 1, "": [None]}, [[[[[]]]]], ["8", 8], {"model": {"model": []}}]
_values = st.sampled_from(_NUMBERS) | st.sampled_from(_TEXTS) | st.sampled_from(_NESTED) | st.text(max_size=6)


@st.composite
def _changed(draw: Any, document: Any) -> Any:
    """A document of which a few places hold something else, or nothing, or have something beside them."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if not (isinstance(place[key], dict | list) and place[key]) or draw(st.booleans()):
                break
            place = place[key]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if kind == "replace":
            place[key] = copy.deepcopy(draw(_values))
        elif kind == "remove" and len(place) > 1:
            del place[key]
        elif isinstance(place, dict):
            place[draw(st.text(max_size=5))] = copy.deepcopy(draw(_values))
    return document


@pytest.fixture(
    params=[
        pytest.param(DEFAULT_EXAMPLES, id="few"),
        pytest.param(SLOW_EXAMPLES, id="more", marks=pytest.mark.slow),
        pytest.param(ALL_EXAMPLES, id="many", marks=pytest.mark.exhaustive),
    ]
)
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """Return what calls a check with so many examples of a strategy.

    The examples are the same in every run, so that a run says something of the change that it tests.
    """

    def run(strategy: st.SearchStrategy[Any], check: Callable[[Any], object]) -> None:
        chosen = settings(
            max_examples=request.param,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )

        @chosen
        @given(example=strategy)
        def test(example: Any) -> None:
            check(example)

        test()

    return run


@pytest.fixture
def sentences() -> Callable[..., st.SearchStrategy[str]]:
    """Return what makes strategies of texts: words put together, with odd numbers and any characters between them."""
    numbers = ["0", "1", "-1", "8", "1e308", "1e-320", "nan", "inf", "-0", "2**64", "9" * 30, "9" * 400, "0x10", "1_0"]
    signs = [*":,+=@/-*.~[]{}\"'\\ ", "\n", "\0", "\x1b[31m", "ä", "٣", "\u202e", "\ud800"]

    def make(*words: str) -> st.SearchStrategy[str]:
        piece = st.sampled_from([*numbers, *signs]) | st.text(max_size=4)
        word = st.sampled_from(words)
        changed = st.builds(_spliced, word, st.integers(0, 40), st.integers(0, 4), piece)
        return word | changed | st.lists(word | changed | piece, max_size=6).map("".join)

    return make


def _spliced(word: str, start: int, length: int, piece: str) -> str:
    start %= len(word) + 1
    return word[:start] + piece + word[start + length :]


@pytest.fixture
def changed() -> Callable[[Any], st.SearchStrategy[Any]]:
    """Return what makes strategies of a document of which a few places are changed."""
    return _changed
