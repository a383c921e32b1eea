"""What a step may take of a card is the same wherever it is asked, and a script may take less."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlptraining import WIDTH, model, train

import actbench
from actbench.errors import UsageError
from actbench.model.context import CONTEXT_BYTES
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter
from actbench.tools.fit.planner import Goal
from actbench.tools.fit.questions import for_card
from actbench.tools.fit.records import EXACT
from actbench.tools.fit.simulations import checked
from actbench.units import MIB


def of_meter(profile: str, limit: int | None) -> int | None:
    return SimulatedMeter(profiles.get(profile), limit).memory_bytes


def of_fit(profile: str, limit: int | None) -> int | None:
    return checked(Case(model="gpt2", batch_size=1, device_profile=profile, memory_limit_bytes=limit))[
        0
    ].memory_limit_bytes


def of_script(profile: str, limit: int | None) -> int | None:
    with actbench.simulate(profile, memory_limit_bytes=limit) as card:
        train()
    return card.measurement.memory_limit_bytes


@pytest.mark.parametrize("of", [of_meter, of_fit, of_script])
def test_a_step_may_take_what_a_context_leaves_or_the_limit_that_was_given(of: Callable[..., int | None]) -> None:
    whole = profiles.get("rtx-4090").memory_bytes

    assert of("rtx-4090", None) == whole - CONTEXT_BYTES
    assert of("rtx-4090", whole) == whole, "a limit is taken as it was given"


def test_a_cpu_has_no_context() -> None:
    assert of_meter("cpu", None) == profiles.get("cpu").memory_bytes


def test_a_card_takes_only_plans_that_leave_room_for_its_context() -> None:
    """Which card is enough is asked with the memory that a step may take of each."""
    asked: list[int] = []

    class Planner:
        def reaching(self, goal: Goal) -> list[Any]:
            asked.append(goal.limit)
            return []

    card = profiles.get("rtx-4060")
    assert for_card(card, Planner(), EXACT) == []  # type: ignore[arg-type]
    assert asked == [card.memory_bytes - CONTEXT_BYTES]


@pytest.mark.filterwarnings("ignore:simulated rtx-4090. a step does not fit")
def test_a_script_that_limits_itself_has_so_much_of_the_card() -> None:
    total = profiles.get("rtx-4090").memory_bytes
    with actbench.simulate("rtx-4090") as card:
        torch.cuda.set_per_process_memory_fraction(0.0005)
        assert torch.cuda.get_per_process_memory_fraction() == 0.0005
        assert torch.cuda.mem_get_info() == (total - CONTEXT_BYTES, total), "the card is as free as before"
        train()

    found = card.measurement
    assert found.memory_limit_bytes == int(0.0005 * total)
    assert not found.fits
    assert any("set_per_process_memory_fraction lets the script take 0.0005 of" in text for text in found.warnings)


@pytest.mark.parametrize("fraction", [1.0, 0.99])
def test_no_fraction_gives_a_script_the_memory_of_the_context(fraction: float) -> None:
    with actbench.simulate("rtx-4090") as card:
        torch.cuda.set_per_process_memory_fraction(fraction)
        train()

    assert card.measurement.memory_limit_bytes == profiles.get("rtx-4090").memory_bytes - CONTEXT_BYTES


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_settings_of_the_allocator_limit_it(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, "expandable_segments:False,per_process_memory_fraction:0.25")
    with actbench.simulate("rtx-4090") as card:
        train()

    assert card.measurement.memory_limit_bytes == profiles.get("rtx-4090").memory_bytes // 4


def fill() -> None:
    """Allocate what fits into what was freed before, if segments grow, and not if each keeps its size."""
    parts = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del parts
    torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")


def shell(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)


def new_name(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)


def nobody(monkeypatch: pytest.MonkeyPatch, setting: str) -> None: ...


def function(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        torch.cuda.memory._set_allocator_settings(setting)  # type: ignore[no-untyped-call]


def after_a_limit(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    shell(monkeypatch, setting)
    torch.cuda.set_per_process_memory_fraction(0.5)


@pytest.mark.parametrize("before", [nobody, shell, new_name])
@pytest.mark.parametrize("inside", [nobody, shell, new_name, function, after_a_limit])
def test_segments_grow_where_the_settings_say_so(
    monkeypatch: pytest.MonkeyPatch, before: Callable[..., None], inside: Callable[..., None]
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    setting = "max_split_size_mb:512, expandable_segments:True"
    before(monkeypatch, setting)
    with actbench.simulate("rtx-4090") as card:
        inside(monkeypatch, setting)
        fill()
        grows = (before, inside) != (nobody, nobody)
        assert torch.cuda.max_memory_reserved() == (80 if grows else 160) * MIB
        train()

    left_out = [text for text in card.measurement.warnings if "max_split_size_mb of torch's allocator is not" in text]
    assert len(left_out) == grows


def test_what_is_alive_is_kept_where_segments_grow_from_now_on() -> None:
    with actbench.simulate("rtx-4090"):
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        function(pytest.MonkeyPatch(), "expandable_segments:True")
        fill()
        assert torch.cuda.memory_allocated() == kept.nbytes
        assert torch.cuda.max_memory_reserved() == 120 * MIB


def test_memory_runs_out_where_a_script_has_limited_itself() -> None:
    with actbench.simulate("rtx-4090", raise_oom=True):
        module = model().cuda()
        torch.cuda.set_per_process_memory_fraction(0.01)
        with pytest.raises(torch.OutOfMemoryError, match=r"of which a step may take 242\.07 MiB"):
            module(torch.randn(512 * MIB // WIDTH, WIDTH, device="cuda"))


def test_what_is_no_scheme_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="simulate: scheme"):
        actbench.simulate("rtx-4090", scheme="checkpoint")
