"""A card that is not there is refused, in each form in which a script can name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from trainings import TRAINING, RunScript

from actbench.errors import MeasurementError
from actbench.model.records import Failure
from actbench.simulator import profiles
from actbench.tools.script.real import RealRun
from actbench.tools.script.simulation import Simulation


def selected() -> None:
    with torch.cuda.device(1):
        pass


def by_default() -> None:
    with torch.device("cuda:1"):
        torch.ones(2)


FORMS: dict[str, Callable[[], Any]] = {
    "made": lambda: torch.zeros(4, device="cuda:1"),
    "made by number": lambda: torch.zeros(4, device=1),
    "made on a device": lambda: torch.randn(4, device=torch.device("cuda", 1)),
    "made like": lambda: torch.empty_like(torch.ones(2), device="cuda:1"),
    "made anew": lambda: torch.ones(2).new_zeros(2, device="cuda:1"),
    "by default": by_default,
    "data": lambda: torch.tensor([1.0], device="cuda:1"),
    "to": lambda: torch.ones(2).to("cuda:1"),
    "to a device": lambda: torch.ones(2).to(torch.device("cuda:1")),
    "to a number": lambda: torch.ones(2).to(1),
    "to by name": lambda: torch.ones(2).to(device="cuda:1", dtype=torch.half),
    "cuda": lambda: torch.ones(2).cuda(1),
    "cuda by name": lambda: torch.ones(2).cuda(device="cuda:1"),
    "from the card": lambda: torch.ones(2, device="cuda").to("cuda:1"),
    "module": lambda: nn.Linear(2, 2).to("cuda:1"),
    "module by number": lambda: nn.Linear(2, 2).cuda(1),
    "layer": lambda: nn.Linear(2, 2, device="cuda:1"),
    "set": lambda: torch.cuda.set_device(1),
    "set by name": lambda: torch.cuda.set_device("cuda:1"),
    "selected": selected,
    "stream": lambda: torch.cuda.Stream(device=1),
    "current stream": lambda: torch.cuda.current_stream(1),
    "generator": lambda: torch.Generator(device="cuda:1"),
    "free memory": lambda: torch.cuda.mem_get_info(1),
    "waiting": lambda: torch.cuda.synchronize(1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_card_that_is_not_there_is_refused(form: str) -> None:
    for block in (Simulation(profiles.get("rtx-4090")), RealRun()):
        with block, pytest.raises(torch.AcceleratorError, match="invalid device ordinal 1"):
            FORMS[form]()


def test_the_card_that_is_there_has_many_names() -> None:
    with Simulation(profiles.get("rtx-4090")):
        for device in ("cuda", "cuda:0", 0, torch.device("cuda:0"), torch.device("cuda")):
            assert torch.ones(2).to(device).device == torch.device("cuda:0")
            assert torch.zeros(2, device=device).is_cuda
        assert torch.ones(2).cuda(0).is_cuda


def selected_before() -> None:
    torch.cuda.set_device(1)
    nn.Linear(2, 2).cuda()


OTHERS = {name: form for name, form in FORMS.items() if name.startswith(("made", "by", "data", "to", "cuda", "from"))}
OTHERS |= {name: FORMS[name] for name in ("module", "module by number", "layer")} | {"selected": selected_before}


@pytest.mark.parametrize("form", OTHERS)
def test_a_process_puts_nothing_on_the_card_of_another(form: str) -> None:
    with Simulation(profiles.get("h100-80gb"), processes=2) as simulation:
        with pytest.raises(MeasurementError, match=r"put on cuda:1, a card of another process"):
            OTHERS[form]()
        assert simulation.memory.allocated_bytes() == 0


def test_a_process_asks_for_the_cards_of_others() -> None:
    with Simulation(profiles.get("h100-80gb"), processes=2):
        assert torch.cuda.get_device_properties(1).total_memory == torch.cuda.mem_get_info(1)[1]
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
        torch.cuda.synchronize(1)
        assert torch.ones(2, device="cuda").device == torch.device("cuda:0")


@pytest.mark.slow
def test_the_line_of_the_script_is_named(run: RunScript) -> None:
    found = run(TRAINING.replace(".cuda()\n", '.to("cuda:1")\n', 1))

    assert isinstance(found, Failure)
    assert "invalid device ordinal 1: 1 card can be seen here" in found.message
    assert "(train.py:6 model = nn.Sequential(" in found.message


@pytest.mark.slow
def test_the_line_that_takes_the_card_of_another_process_is_named(run: RunScript) -> None:
    found = run(TRAINING.replace(".cuda()\n", '.to("cuda:1")\n', 1), processes=2)

    assert isinstance(found, Failure)
    assert "put on cuda:1, a card of another process" in found.message
    assert "(train.py:6 model = nn.Sequential(" in found.message
