"""What the host needs for an operator is the time of a step beyond that of its operators and views."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from actbench.tools.calibrate import host as of_host, subjects
from actbench.tools.calibrate.host import host_of
from actbench.tools.calibrate.subjects import ENCODER, NETWORK, Subject

CPU = torch.device("cpu")


def test_parts_of_a_step_and_packing_have_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_host, "SMALL", (ENCODER,))

    host = host_of(CPU, ("fewbit:3",), time.perf_counter, [])

    assert host.keys() == {"forward", "backward", "optimizer", "packing", "view", "listed"}
    assert min(host.values()) > 0
    assert max(host.values()) < 0.1  # seconds, of which no operator takes that many


def test_a_scheme_that_fails_is_noted_and_packing_is_as_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []

    def broken(size: int) -> Any:
        raise ZeroDivisionError("division by zero")

    def stepping(device: torch.device, model: Any, spec: str) -> Subject:
        known = subjects.stepping(device, model, "exact")
        return known if spec == "exact" else known._replace(name="fewbit:3 on resnet18", step=broken)

    monkeypatch.setattr(of_host, "SMALL", (NETWORK,))
    monkeypatch.setattr(of_host, "stepping", stepping)

    host = host_of(CPU, ("fewbit:3",), time.perf_counter, failed)

    assert host["packing"] == host["forward"]
    assert failed == ["the host in fewbit:3 on resnet18: ZeroDivisionError: division by zero"]
