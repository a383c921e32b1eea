"""Threads of a script: one that trains, and one that computes beside the one that does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from mlptraining import train
from torch import nn

import actbench


def in_thread(function: Callable[[], Any]) -> Any:
    """Return what a function returns or raises in a thread of its own."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


def under_autocast() -> tuple[bool, torch.dtype, torch.dtype, float]:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = torch.full((2, 2), 3.0) @ weight
    with torch.autocast("cuda", enabled=False):
        exact = torch.ones(2, 2) @ weight
    (product.float() + exact).sum().backward()
    assert weight.grad is not None
    return torch.is_autocast_enabled("cuda"), product.dtype, exact.dtype, weight.grad.sum().item()


def test_a_thread_beside_a_simulation_computes_under_autocast_as_ever() -> None:
    expected = in_thread(under_autocast)

    with actbench.simulate("rtx-4090") as card:
        found = in_thread(under_autocast)
        train()

    assert found == expected == (False, torch.bfloat16, torch.float32, 4 * (2 * 3.0 + 2 * 1.0))
    assert card.peak_bytes > 0


def of_a_layer() -> float:
    layer = nn.Linear(600, 600)
    layer(torch.ones(2, 600)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.sum().item()


def test_a_layer_in_a_thread_beside_a_simulation_has_values() -> None:
    with actbench.simulate("rtx-4090"):
        found = in_thread(of_a_layer)

    assert found == 2 * 600 * 600


def test_a_training_in_a_thread_needs_what_it_needs_without_one() -> None:
    with actbench.simulate("rtx-4090") as expected:
        train()

    with actbench.simulate("rtx-4090") as card:
        in_thread(train)

    assert card.peak_bytes == expected.peak_bytes
