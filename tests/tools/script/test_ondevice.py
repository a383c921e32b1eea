"""Scripts on a CUDA device: its allocator's counters are stand-ins here, but for the tests marked gpu."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench.errors import MeasurementError
from actbench.measuring.meters.cudameter import CudaMeter
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.tools.script.bench import Session
from actbench.tools.script.ondevice import CudaRun

FORWARD, BACKWARD, OPTIMIZER = 500, 900, 600


class Event:
    """Stands for an event of the device: each is a second after the one before."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.count += 1
        self.at = Event.count

    def elapsed_time(self, later: Event) -> float:
        return 1000.0 * (later.at - self.at)


class Allocator:
    """Stands for torch's allocator, whose peak is set by the script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live, self.peak, self.resets = 100, 0, 0
        for owner in (torch.cuda, torch.cuda.memory):
            for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
                monkeypatch.setattr(owner, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(CudaMeter, "__init__", lambda self, limit: vars(self).update(memory_bytes=limit or 10_000))
        monkeypatch.setattr(CudaMeter, "active", lambda self: nullcontext())

    def reach(self, amount: int) -> None:
        self.peak = max(self.peak, amount)

    def memory_allocated(self, device: Any = None) -> int:
        return self.live

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak

    def max_memory_reserved(self, device: Any = None) -> int:
        return 2 * self.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = self.live
        self.resets += 1


def test_the_peak_of_a_step_is_that_of_its_highest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: allocator.reach(BACKWARD))
    seen = []

    with CudaRun() as run:
        for _ in range(20):
            allocator.reach(FORWARD)
            allocator.live = 350
            loss = weight.sum()
            loss.backward()
            allocator.live = 100
            seen.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()  # of the script's own: what was before still counts
            allocator.reach(OPTIMIZER)
            optimizer.step()
    found = run.measurement

    assert (found.peak_bytes, found.peak_phase, found.reserved_bytes) == (BACKWARD, "backward", 2 * BACKWARD)
    assert found.activation_bytes == 250
    assert found.step_seconds == (1.0, 1.0, 1.0)
    assert len(run.steps.done) == 6  # three until two are equal, three that are timed
    assert set(seen) == {BACKWARD}


def test_of_steps_that_differ_the_largest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch is the largest, and the last one small."""
    allocator = Allocator(monkeypatch)
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    peaks = [FORWARD, BACKWARD, OPTIMIZER]

    with CudaRun(steps=len(peaks)) as run:
        for peak in [*peaks, *3 * [FORWARD]]:
            allocator.reach(peak)
            weight.sum().backward()
            optimizer.step()

    assert run.measurement.peak_bytes == BACKWARD
    assert run.measurement.built is not None
    assert run.measurement.built.step_peaks == (BACKWARD, OPTIMIZER)  # the first makes optimizer state
    assert run.measurement.warnings[0].startswith("Steps differ (600 B to 900 B); the largest is shown.")


def test_what_would_change_the_script_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Allocator(monkeypatch)
    script = Script(target=str(tmp_path / "train.py"), batch_size=4)
    session = Session(Case(model=script.text, batch_size=4, meter="cuda", script=script))

    with pytest.raises(Exception, match="--batch-size: --meter cuda runs a script as it is"):
        session.memory()


def test_without_a_device_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(MeasurementError, match="no CUDA device here"):
        CudaRun()


@pytest.mark.gpu
def test_a_script_on_a_device_needs_its_tensors() -> None:
    with CudaRun() as run:
        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(512, 1024, device="cuda")
        for _ in range(20):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = run.measurement

    assert found.weights_bytes == (1024 * 1024 + 1024) * 4
    assert found.optimizer_bytes is not None
    assert found.peak_bytes > found.weights_bytes + found.optimizer_bytes
    assert found.step_seconds is not None
    assert all(second > 0 for second in found.step_seconds)
