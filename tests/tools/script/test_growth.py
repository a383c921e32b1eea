"""Memory that a script keeps with each step is found, with the line that makes it; what only changes hands is not."""

from __future__ import annotations

import gc
import itertools
from collections import UserList, deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlptraining import FLOAT, ROWS, WIDTH, model, train
from torch import Tensor

import actbench
from actbench.model.measured import Measurement
from actbench.report.advice import needed_bytes
from actbench.units import MIB

KEPT = ROWS * WIDTH * FLOAT
"""Bytes of an output."""


def loop(keep: Callable[[Tensor, int], object], steps: Iterable[int] = range(2000)) -> Measurement:
    """Return what is measured of a loop that tells ``keep`` of each output and of the number of its step."""
    with actbench.simulate("rtx-4090") as card:
        module = model().cuda()
        optimizer = torch.optim.AdamW(module.parameters())
        for number in steps:
            y = module(torch.randn(ROWS, WIDTH, device="cuda"))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            keep(y, number)
    return card.measurement


def test_outputs_in_a_list_grow_by_the_same_amount_each_step() -> None:
    outputs: list[Tensor] = []
    found = loop(lambda y, number: outputs.append(y))

    assert found.growth is not None
    assert found.growth.step_bytes == KEPT
    assert "y = module(torch.randn" in (found.growth.line or "")
    assert found.growth.more_steps == ((found.memory_limit_bytes or 0) - needed_bytes(found)) // KEPT
    assert found.fits
    assert found.runs_out


@pytest.mark.parametrize("of", ["outputs", "outputs without gradients", "losses"])
def test_what_a_loop_keeps_is_no_batch(of: str) -> None:
    kept: list[Tensor] = []
    keeps = {
        "outputs": kept.append,
        "outputs without gradients": lambda y: kept.append(y.detach()),
        "losses": lambda y: kept.append(y.square().sum()),
    }
    found = loop(lambda y, number: keeps[of](y))

    parts = found.peak_parts
    assert parts is not None
    assert parts.batch_bytes == 0
    assert parts.kept_bytes >= KEPT
    kinds = {holder.kind for holder in found.timeline.holders if "y = module(" in (holder.line or "")}  # type: ignore[union-attr]
    assert "kept" in kinds
    assert "batch" not in kinds


def test_a_batch_that_stays_on_the_card_is_a_batch() -> None:
    x: list[Tensor] = []

    def keep(y: Tensor, number: int) -> None:
        x.append(torch.ones(ROWS, WIDTH, device="cpu").cuda())

    found = loop(keep)

    assert found.peak_parts is not None
    assert found.peak_parts.batch_bytes >= KEPT


def test_a_little_that_each_step_keeps_of_much_is_found_too() -> None:
    """The steps are alike to a hundred-thousandth, and three of them, but not two, tell growth from a first copy."""
    few: list[Tensor] = []

    def keep(y: Tensor, number: int) -> None:
        few.append(torch.empty(1024 * MIB // FLOAT, device="cuda") if not few else y[:16].clone())

    found = loop(keep)

    assert found.growth is not None
    assert found.growth.step_bytes == 16 * WIDTH * FLOAT


@pytest.mark.parametrize("many", [1, 3])
def test_the_last_outputs_are_no_growth(many: int) -> None:
    last: deque[Tensor] = deque(maxlen=many)

    assert loop(lambda y, number: last.append(y)).growth is None


def test_what_is_made_anew_or_kept_once_is_no_growth() -> None:
    held: list[Tensor] = [torch.zeros(())]
    cached: dict[bool, Tensor] = {}

    def renew(y: Tensor, number: int) -> None:
        held[0] = held[0] + y.detach()
        cached.setdefault(number > 1, y)

    assert loop(renew).growth is None
    with actbench.simulate("rtx-4090") as card:
        train()
    assert card.measurement.growth is None
    assert not card.measurement.runs_out


def test_steps_that_leave_other_amounts_grow_by_the_least() -> None:
    kept: list[Tensor] = []
    found = loop(lambda y, number: kept.append(y[: ROWS // (1 + number % 2)].clone()), itertools.count())

    assert found.growth is not None
    assert found.growth.step_bytes == KEPT // 2


class Meter:
    """Keeps what it is told in an attribute."""

    def __init__(self) -> None:
        self.history: dict[str, list[Tensor]] = {"outputs": []}

    def update(self, y: Tensor) -> None:
        self.history["outputs"].append(y.detach())


def in_a_list() -> tuple[Callable[[Tensor, int], object], str]:
    outputs: list[Tensor] = []
    return lambda y, number: outputs.append(y), "outputs.append(y)"


def in_a_dictionary() -> tuple[Callable[[Tensor, int], object], str]:
    seen: dict[int, Tensor] = {}

    def keep(y: Tensor, number: int) -> None:
        seen[number] = y

    return keep, "seen[number] = y"


def in_an_attribute() -> tuple[Callable[[Tensor, int], object], str]:
    meter = Meter()
    return lambda y, number: meter.update(y), 'self.history["outputs"].append(y.detach())'


def by_the_graphs_of_losses() -> tuple[Callable[[Tensor, int], object], str]:
    losses: list[Tensor] = []
    return lambda y, number: losses.append(y.square().sum()), "losses.append(y.square().sum())"


def by_the_graph_of_a_sum() -> tuple[Callable[[Tensor, int], object], str]:
    total = torch.zeros((), device="cuda")

    def keep(y: Tensor, number: int) -> None:
        nonlocal total
        total = total + y.square().sum()

    return keep, "total = total + y.square().sum()"


def by_a_graph_of_packed_tensors() -> tuple[Callable[[Tensor, int], object], str]:
    losses: list[Tensor] = []

    def unpack(packed: tuple[Tensor]) -> Tensor:
        raise AssertionError("a hook must not run when a graph is looked at")

    def keep(y: Tensor, number: int) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved,), unpack):
            losses.append(y.square().sum())

    return keep, "losses.append(y.square().sum())"


def where_no_line_fills_it() -> tuple[Callable[[Tensor, int], object], str]:
    ring: deque[Tensor] = deque()
    return lambda y, number: deque.append(ring, y), "ring"


def in_a_list_of_a_class() -> tuple[Callable[[Tensor, int], object], str]:
    outputs = UserList[Tensor]()
    return lambda y, number: outputs.append(y), "outputs.append(y)"


def in_a_namespace() -> tuple[Callable[[Tensor, int], object], str]:
    state = SimpleNamespace(made=[])
    return lambda y, number: state.made.append(y), "state.made.append(y)"


def in_an_object_of_a_library() -> tuple[Callable[[Tensor, int], object], str]:
    metric: Any = torch.nn.Module()
    metric.gathered = []
    return lambda y, number: metric.gathered.append(y), "metric.gathered.append(y)"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (in_a_list, "container"),
        (in_a_dictionary, "container"),
        (in_an_attribute, "container"),
        (by_the_graphs_of_losses, "graph"),
        (by_the_graph_of_a_sum, "graph"),
        (by_a_graph_of_packed_tensors, "graph"),
        (where_no_line_fills_it, "container"),
        (in_a_list_of_a_class, "container"),
        (in_a_namespace, "container"),
        (in_an_object_of_a_library, "library"),
    ],
)
def test_the_line_that_keeps_is_named(
    make: Callable[[], tuple[Callable[[Tensor, int], object], str]], kind: str
) -> None:
    with actbench.simulate("rtx-4090") as card:
        keep, words = make()
        module = model().cuda()
        optimizer = torch.optim.AdamW(module.parameters())
        for number in range(2000):
            y = module(torch.randn(ROWS, WIDTH, device="cuda"))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            keep(y, number)

    growth = card.measurement.growth
    assert growth is not None
    assert growth.keeper is not None
    assert words in growth.keeper
    assert growth.kind == kind
    assert len(card.measurement.built.step_peaks) < 8  # type: ignore[union-attr]
    assert "y = module(torch.randn" in (growth.line or "")


class Circular:
    """Holds a tensor, and itself."""

    def __init__(self, held: Tensor) -> None:
        self.held, self.own = held, self


def test_what_waits_for_pythons_collector_is_growth_that_ends() -> None:
    def keep(y: Tensor, number: int) -> None:
        Circular(torch.cat([y.detach()] * 4))

    found = loop(keep)

    assert found.growth is not None
    assert (found.growth.kind, found.growth.step_bytes) == ("cycle", 4 * KEPT)
    assert "Circular(torch.cat([y.detach()] * 4))" in (found.growth.line or "")
    assert not found.runs_out


def test_cycles_that_a_script_lets_the_collector_free_are_no_growth() -> None:
    def keep(y: Tensor, number: int) -> None:
        Circular(torch.cat([y.detach()] * 4))
        gc.collect()

    assert loop(keep).growth is None


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_graphs_that_a_backward_pass_has_freed_are_passed_over() -> None:
    losses: list[Tensor] = []
    outputs: list[Tensor] = []
    with actbench.simulate("rtx-4090") as card:
        module = model().cuda()
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(2000):
            y = module(torch.randn(ROWS, WIDTH, device="cuda"))
            loss = Twice.apply(y[torch.arange(4, device="cuda")]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            outputs.append(y.detach())

    growth = card.measurement.growth
    assert growth is not None
    assert "outputs.append(y.detach())" in (growth.keeper or "")


def test_variables_that_a_function_deletes_are_freed_though_its_frame_was_looked_at() -> None:
    """Where steps grow, frames are looked at; the first steps of the same loop are looked at by nobody."""
    small = 2**18
    kept: list[Tensor] = []

    def loop(steps: int) -> int:
        with actbench.simulate("rtx-4090", steps=steps) as card:
            module = model().cuda()
            optimizer = torch.optim.AdamW(module.parameters())
            for _ in range(2000):
                x = torch.randn(ROWS, WIDTH, device="cuda")
                loss = module(x).square().mean()
                loss.backward()
                del x, loss
                optimizer.step()
                optimizer.zero_grad()
                kept.append(torch.empty(small, dtype=torch.uint8, device="cuda"))
        return card.peak_bytes

    assert loop(8) == loop(3) + 5 * small
