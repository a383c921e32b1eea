"""The memory of a script while it runs, as the process that runs it reports it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actbench import livememory
from actbench.errors import MeasurementError
from actbench.model.live import LiveMemory
from actbench.model.measured import Measurement
from actbench.model.meters import MeterName
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.run.isolated import IsolatedSession
from actbench.run.processes import ForkServer
from actbench.tools.script.bench import Session

SCRIPT = """
import torch
from torch import nn

net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(net.parameters())
data = torch.utils.data.TensorDataset(torch.zeros(2**12, 512))
for (x,) in torch.utils.data.DataLoader(data, batch_size=256, num_workers=WORKERS):
    net(x.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
Follow = Callable[..., tuple[Measurement, list[LiveMemory]]]


@pytest.fixture
def follow(server: ForkServer, tmp_path: Path) -> Follow:
    """Return what measures the script, and returns what was reported meanwhile."""

    def followed(meter: MeterName = "simulated", *, is_live: bool = True, workers: int = 0, **options: Any) -> Any:
        file, told = tmp_path / "train.py", list[LiveMemory]()
        file.write_text(SCRIPT.replace("WORKERS", str(workers)))
        profile = "rtx-4090" if meter == "simulated" else None
        case = Case(
            model="train.py", batch_size=1, meter=meter, device_profile=profile, script=Script(target=str(file))
        ).model_copy(update=options)
        with IsolatedSession(server, case, 300.0, is_live=is_live) as session:
            session.reported = told.append
            found = session.memory()
        assert isinstance(found, Measurement), found
        return found, told

    return followed


def ends_of_steps(told: list[LiveMemory]) -> list[LiveMemory]:
    return [each for each in told if each.step is not None and each.phase is None]


def test_each_step_ends_with_a_report_of_what_is_alive_and_who_holds_it(follow: Follow) -> None:
    found, told = follow(workers=2)

    assert found.built is not None
    ends = ends_of_steps(told)
    assert [each.step for each in ends] == list(range(1, len(ends) + 1))
    assert found.built.stopped_after == len(ends)
    assert [each.peak_bytes for each in told] == sorted(each.peak_bytes for each in told)
    assert told[-1].peak_bytes == found.script_peak_bytes
    assert told[-1].limit_bytes == found.memory_limit_bytes
    assert all(max(each.samples) <= each.peak_bytes for each in told)
    held = dict(ends[-1].holders)
    weights = next(held[line] for line in held if line.startswith("train.py:5 net = nn.Sequential"))
    assert weights == found.weights_bytes
    assert any(line.startswith("train.py:10 optimizer.step()") for line in held)
    assert sum(held.values()) <= ends[-1].live_bytes


def test_nothing_is_reported_unless_it_is_asked_for_and_the_figures_are_the_same(follow: Follow) -> None:
    found, told = follow(is_live=False)
    same, _ = follow()

    assert told == []
    assert same.peak_bytes == found.peak_bytes
    assert same.timeline == found.timeline


def test_trials_report_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def opened(*_: Any) -> None:
        heard.append(livememory.listening() is not None)
        raise MeasurementError("it is not opened")

    monkeypatch.setattr(Session, "_opened", opened)
    session = Session(Case(model="train.py", batch_size=1, script=Script(target="train.py")))
    runs = (partial(session._run, session.script, session._say), session.run_as_it_is, partial(session._trial, 8))
    with livememory.report_to(print):
        for run in runs:
            with pytest.raises(MeasurementError, match="not opened"):
                run(lambda found: pytest.fail("it ended"))

    assert heard == [True, False, False]


def test_a_run_on_the_cpu_reports_at_the_end_of_each_step(follow: Follow) -> None:
    found, told = follow("cpu")

    assert told
    assert told == ends_of_steps(told)
    assert told[-1].peak_bytes >= found.peak_bytes
    assert told[-1].limit_bytes == found.memory_limit_bytes
