"""What the host needs for an operator is the time of a step beyond that of its operators and views."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from actbench.tools.calibrate import host as of_host
from actbench.tools.calibrate.host import host_of
from actbench.tools.calibrate.steps import ENCODER, NETWORK, Model

CPU = torch.device("cpu")


def test_parts_of_a_step_and_packing_have_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_host, "SMALL", (ENCODER,))
    monkeypatch.setattr(of_host, "_PACKING", ("fewbit:3",))

    host = host_of(CPU, time.perf_counter, [])

    assert host.keys() == {"forward", "backward", "optimizer", "packing", "view", "listed"}
    assert min(host.values()) > 0
    assert max(host.values()) < 0.1  # seconds, of which no operator takes that many


def test_each_operator_has_its_share_of_the_parts_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"forward": 3e-5, "backward": 2e-5, "optimizer": 4e-6, "packing": 1e-4}
    rows = [(40, 0, 0, 0), (0, 60, 0, 0), (0, 0, 12, 0), (38, 0, 0, 7), (0, 55, 0, 9), (0, 0, 12, 0)]
    parts = [([*row], sum(count * each for count, each in zip(row, taken.values(), strict=True))) for row in rows]
    monkeypatch.setattr(of_host, "SMALL", (NETWORK,))
    monkeypatch.setattr(of_host, "_PACKING", ())
    monkeypatch.setattr(of_host, "_parts", lambda *_: parts)

    host = host_of(CPU, time.perf_counter, [])

    assert {name: host[name] for name in taken} == pytest.approx(taken)


def test_a_scheme_that_fails_is_noted_and_packing_is_as_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    known = Model.steps

    def broken(model: Model, spec: str, device: torch.device) -> Any:
        if spec == "fewbit:3":
            raise ZeroDivisionError("division by zero")
        return known(model, spec, device)

    monkeypatch.setattr(of_host, "SMALL", (NETWORK,))
    monkeypatch.setattr(of_host, "_PACKING", ("fewbit:3",))
    monkeypatch.setattr(Model, "steps", broken)

    host = host_of(CPU, time.perf_counter, notes)

    assert host["packing"] == host["forward"]
    assert notes == [
        "Not measured, because it failed: fewbit:3 on resnet18, the host: ZeroDivisionError: division by zero."
    ]
