"""Marks say which tests make test, make slow and make exhaustive run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


class Item:
    """A parameter of a test, with marks."""

    def __init__(self, test: str, number: int, *marks: pytest.MarkDecorator) -> None:
        self.name = f"{test}[{number}]"
        self.nodeid = f"tests/test_some.py::{self.name}"
        self.marks = {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark

    @property
    def kind(self) -> str:
        return " and ".join(self.marks.keys() - {"sampled"}) or "fast"


def test_a_sample_of_parameters_is_fast_another_slow_and_the_others_exhaustive(request: pytest.FixtureRequest) -> None:
    hooks = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    ten = [Item("test_of_ten", number, pytest.mark.sampled(fast=2, slow=3)) for number in range(10)]
    few = [Item("test_of_few", number, pytest.mark.sampled(slow=1)) for number in range(2)]
    marked = [
        Item("test_of_few", 2 + turn, pytest.mark.sampled(slow=1), mark)
        for turn, mark in enumerate((pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.gpu))
    ]
    plain = Item("test_alone", 0)

    hooks.pytest_collection_modifyitems([*ten, *few, *marked, plain])
    chosen = [item.name for item in ten if item.kind == "fast"]
    more = [Item("test_of_ten", number, pytest.mark.sampled(fast=2, slow=3)) for number in range(11)]
    hooks.pytest_collection_modifyitems(more)

    assert Counter(item.kind for item in ten) == {"fast": 2, "slow": 3, "exhaustive": 5}
    assert Counter(item.kind for item in few) == {"slow": 1, "exhaustive": 1}
    assert [item.kind for item in (*marked, plain)] == ["slow", "exhaustive", "gpu", "fast"]
    assert {item.name for item in more if item.kind == "fast"} <= {*chosen, "test_of_ten[10]"}
