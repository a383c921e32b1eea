"""Seeded numbers of a script are those of a real run: lengths of made-up data, and the order of rows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler, random_split

import actbench
from actbench.tools.script.real import RealRun
from actbench.tools.script.values import hostrng
from actbench.tools.script.values.hostrng import HostRng

ROWS = 12


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def order(**options: Any) -> list[int]:
    loader = DataLoader(TensorDataset(torch.arange(ROWS)), 4, **options)
    return [int(row) for _ in range(2) for (rows,) in loader for row in rows]


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3).tolist(),
    "randint": lambda: torch.randint(100, (6,)).tolist(),
    "randint of a generator": lambda: torch.randint(5, 100, (6,), generator=seeded()).tolist(),
    "randint of 480 KB": lambda: torch.randint(100, (60_000,)).tolist(),
    "randint of three dimensions": lambda: torch.randint(0, 9, (2, 3, 4)).tolist(),
    "randint_like": lambda: torch.randint_like(torch.zeros(6, dtype=torch.int64), 100).tolist(),
    "randperm": lambda: torch.randperm(8).tolist(),
    "randperm of a generator": lambda: torch.randperm(8, generator=seeded()).tolist(),
    "random_": lambda: torch.empty(4, dtype=torch.int64).random_().tolist(),
    "multinomial": lambda: torch.multinomial(torch.ones(20), 5).tolist(),
    "multinomial of a generator": lambda: torch.multinomial(torch.ones(20), 5, generator=seeded()).tolist(),
    "bernoulli": lambda: torch.bernoulli(torch.full((8,), 0.5)).tolist(),
    "normal": lambda: torch.normal(0.0, 1.0, (4,)).tolist(),
    "after integers": lambda: (torch.randint(9, (3,)).tolist(), torch.randperm(4).tolist(), torch.rand(2).tolist()),
    "the state": lambda: (torch.randint(9, (3,)).tolist(), torch.get_rng_state().tolist()[:40]),
    "numpy": lambda: (np.random.rand(2).tolist(), np.random.permutation(5).tolist()),
    "random": lambda: (random.random(), random.sample(range(10), 3)),
    "random_split": lambda: list(random_split(range(ROWS), [4, 8])[0]),  # type: ignore[arg-type]
    "RandomSampler": lambda: list(RandomSampler(range(ROWS))),
    "WeightedRandomSampler": lambda: list(WeightedRandomSampler([0.5] * ROWS, ROWS)),
    "DataLoader": lambda: order(shuffle=True),
    "DataLoader of a generator": lambda: order(shuffle=True, generator=seeded()),
    "DataLoader with workers": lambda: order(shuffle=True, num_workers=2),
}


def drawn(draw: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    return draw()


def test_seeded_numbers_are_those_of_torch() -> None:
    expected = {name: drawn(draw) for name, draw in DRAWS.items()}

    with actbench.simulate("rtx-4090"):
        found = {name: drawn(draw) for name, draw in DRAWS.items()}

    assert found == expected


def test_seeds_set_the_order_of_rows_in_a_run_on_this_machine_too() -> None:
    expected = drawn(lambda: order(shuffle=True))

    with RealRun():
        order(shuffle=True)
        found = drawn(lambda: order(shuffle=True))

    assert found == expected


LARGE = 2**20
MADE: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(300, 300),
    "rand of two pieces and some": lambda: torch.rand(2 * LARGE + 5),
    "randn": lambda: torch.randn(257, 129),
    "randn of two pieces and some": lambda: torch.randn(2 * LARGE + 21),
    "randn of doubles": lambda: torch.randn(20_001, dtype=torch.float64),
    "randn of a generator": lambda: torch.randn(300, 301, generator=torch.default_generator),
    "a half type": lambda: torch.randn(333, 333, dtype=torch.bfloat16),
    "randn_like": lambda: torch.randn_like(torch.zeros(300, 300)),
    "normal": lambda: torch.normal(0.0, 2.0, (300, 303)),
    "normal of means": lambda: torch.normal(torch.zeros(300, 303), 2.0),
    "columns": lambda: torch.empty(300, 301).t().normal_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((300, 300), 0.5)),
    "bernoulli_": lambda: torch.empty(300, 300).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda: torch.empty(300, 300).bernoulli_(torch.full((300, 300), 0.3)),
    "exponential_": lambda: torch.empty(100_003).exponential_(),
    "random_": lambda: torch.empty(300, 301).random_(),
    "cauchy_": lambda: torch.empty(100_003).cauchy_(),
    "randint": lambda: torch.randint(100, (9 * LARGE,)),
    "randint of 64 bits": lambda: torch.randint(2**40, (9 * LARGE,)),
    "randperm": lambda: torch.randperm(9 * LARGE),
    "dropout": lambda: nn.functional.dropout(torch.ones(300, 300)),
    "layer": lambda: nn.Linear(300, 301),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(300, 300), std=0.02),
    "attention": lambda: nn.TransformerEncoderLayer(256, 4),
}


ON_CPU = ("dropout", "layer", "randn of two pieces and some")


@pytest.mark.parametrize(
    ("name", "device"), [*((name, "rtx-4090") for name in MADE), *((name, "cpu") for name in ON_CPU)]
)
def test_numbers_after_large_tensors_are_those_of_torch(name: str, device: str) -> None:
    def numbers() -> Any:
        MADE[name]()
        return torch.rand(2).tolist(), torch.randn(3).tolist(), order(shuffle=True)

    expected = drawn(numbers)

    with actbench.simulate(device):
        found = drawn(numbers)

    assert found == expected


def test_what_the_card_draws_leaves_the_generator_of_the_host_as_it_is() -> None:
    expected = drawn(lambda: order(shuffle=True))

    with actbench.simulate("rtx-4090"):
        found = drawn(lambda: (torch.randn(3, device="cuda"), torch.rand(300, 300, device="cuda"), order(shuffle=True)))

    assert found[2] == expected


def test_more_numbers_than_are_drawn_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(hostrng, "MOST", 100_000)
    draw = HostRng(notes.append).draw
    x = torch.empty(300, 200)
    for _ in range(2):
        draw(torch.ops.aten.normal_.default, (x, 0.0, 1.0), {}, x)

    assert len(notes) == 1
    assert "order of rows" in notes[0]


def test_what_one_run_has_drawn_another_does_not_draw_again() -> None:
    states, made = hostrng.GeneratorStates(), []

    def state_after(rows: int) -> list[int]:
        torch.manual_seed(3)

        def draw() -> None:
            made.append(rows)
            torch.empty(rows).normal_()

        states.after(torch.default_generator, draw, f"normal_ {rows}")
        found: list[int] = torch.get_rng_state().tolist()
        return found

    expected = [state_after(rows) for rows in (48, 1000)]

    assert expected[0] != expected[1]
    assert [state_after(rows) for rows in (48, 1000)] == expected
    assert made == [48, 1000]


def test_states_of_a_forked_process_are_known() -> None:
    states = hostrng.GeneratorStates()
    torch.manual_seed(3)
    child = os.fork()
    if not child:
        states.after(torch.default_generator, partial(torch.nn.init.normal_, torch.empty(64)), "normal_ 64")
        os._exit(0)
    os.waitpid(child, 0)

    states.after(torch.default_generator, lambda: pytest.fail("drawn again"), "normal_ 64")

    found = torch.get_rng_state()
    torch.manual_seed(3)
    torch.empty(64).normal_()
    assert torch.equal(found, torch.get_rng_state())
