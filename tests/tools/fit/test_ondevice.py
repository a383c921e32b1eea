"""What is measured is measured on the card that was simulated, or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from actbench.errors import MeasurementError
from actbench.machine import now, provenance
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.report.store import Store
from actbench.run import runner
from actbench.simulator import profiles
from actbench.tools.fit.fit import measured_on, meter_of
from actbench.tools.fit.records import Asked, FitRecord, PlannedStep
from actbench.tools.fit.simulations import Means

GIB = 1024**3
OWN = "gib = 20\ncompute_capability = [8, 9]\nfp32 = 50\nbandwidth = 900\nlink = 30\nlaunch = 2\n"


@pytest.fixture
def card(monkeypatch):
    """Return what puts a card into this machine."""

    def put(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: name)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: capability)

    return put


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("t4", "Tesla T4"),
        ("v100-16gb", "Tesla V100-SXM2-16GB"),
        ("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti"),
        ("rtx-3080-10gb", "NVIDIA GeForce RTX 3080"),
        ("rtx-4090", "NVIDIA GeForce RTX 4090"),
        ("rtx-a6000", "NVIDIA RTX A6000"),
        ("a100-40gb", "NVIDIA A100-PCIE-40GB"),
        ("h100-80gb", "NVIDIA H100 80GB HBM3"),
        ("h100-80gb", "NVIDIA H100 PCIe"),
    ],
)
def test_the_card_of_a_profile_is_measured(card, profile, name):
    found = profiles.get(profile)
    card(name, found.compute_capability)

    assert meter_of(found) == "cuda"


@pytest.mark.parametrize(
    ("profile", "name", "capability"),
    [
        ("rtx-4090", "NVIDIA GeForce RTX 3090", (8, 6)),
        ("rtx-4090", "NVIDIA L4", (8, 9)),
        ("rtx-4060", "NVIDIA GeForce RTX 4060 Ti", (8, 9)),
        ("rtx-4090", "NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9)),
        ("l4", "NVIDIA L40S", (8, 9)),
        ("a100-40gb", "NVIDIA A100-SXM4-80GB", (8, 0)),
        ("h100-80gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0)),
    ],
)
def test_another_card_is_refused(card, profile, name, capability):
    card(name, capability)

    with pytest.raises(MeasurementError) as refused:
        meter_of(profiles.get(profile))

    for word in ("--measure", name, f"--device-profile {profile}", "leave --measure out", "actbench devices"):
        assert word in str(refused.value)


def test_the_name_of_ones_own_profile_is_ones_own(card, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    own = profiles.get(str(path))
    card("NVIDIA RTX 4000 Ada", (8, 9))
    assert meter_of(own) == "cuda"

    card("NVIDIA RTX A6000", (8, 6))
    with pytest.raises(MeasurementError, match=r"8\.6.*mine\.toml is another \(compute capability 8\.9\)"):
        meter_of(own)


def tried(base: str, need: int) -> PlannedStep:
    """Return a plan that was simulated within 88 bytes, of a fit in 100."""
    case = Case(model="tiny-llama", batch_size=1, scheme="lora:16+checkpoint", memory_limit_bytes=88)
    outcome = Measurement(weights_bytes=1, activation_bytes=0, peak_bytes=need)
    said = {"recorded_at": now(), "asked": Asked(scheme=base, limit_bytes=100), **provenance("actbench fit")}
    return PlannedStep(FitRecord(recipe="m", case=case, outcome=outcome, **said), outcome, 1.0, 1.0)


def test_a_plan_is_measured_once_with_the_limit_that_was_asked_for_and_serves_every_request(monkeypatch, tmp_path):
    begun = []

    def run_plan(plan, store, **_):
        for case in [each.case for each in plan if not store.done(each.case)]:
            begun.append(case)
            outcome = Measurement(weights_bytes=1, activation_bytes=0, peak_bytes=90)
            store.append(FitRecord(recipe="m", case=case, outcome=outcome, recorded_at=now(), **provenance("x")))

    monkeypatch.setattr(runner, "run_plan", run_plan)
    with Store.opened(tmp_path / "m.fit.jsonl", FitRecord) as store:
        for base in ("exact", "lora:16"):
            measured_on("cpu", [tried(base, 90)], SimpleNamespace(store=store, means=Means(command="x")))  # type: ignore[arg-type]
        (record,) = store.records

    assert [(case.meter, case.memory_limit_bytes) for case in begun] == [("cpu", 100)]
    assert [each.asked.scheme for each in record.of_requests()] == ["exact", "lora:16"]
