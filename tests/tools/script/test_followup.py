"""After a script, what is asked next is simulated: the best remedy, and the largest batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actbench.model.measured import Advised, Measurement
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.report.advice import needed_bytes
from actbench.run.isolated import IsolatedSession
from actbench.run.processes import ForkServer
from actbench.tools.script import followup
from actbench.units import MIB

TRAIN = """
import torch
from torch import nn

print("trains")
net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.zeros({rows}, 1024))
for (x,) in torch.utils.data.DataLoader(data, batch_size=4096, drop_last=True):
    net(x.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parent))
        with ForkServer("patientfollowup") as found:
            yield found


def measured(
    server: ForkServer, folder: Path, *, rows: int = 2**16, limit: int = 256 * MIB
) -> tuple[Measurement, list[tuple[int, bool]]]:
    """Return the measurement of a script in so much memory, and the batches that were tried."""
    file, tried = folder / "train.py", list[tuple[int, bool]]()
    file.write_text(TRAIN.replace("{rows}", str(rows)))
    case = Case(
        model="train.py",
        batch_size=1,
        script=Script(target=str(file)),
        meter="simulated",
        device_profile="rtx-4090",
        memory_limit_bytes=limit,
    )
    for name in ("out", "err"):
        (folder / name).touch()
    with IsolatedSession(server, case, 300.0, printed=str(folder)) as session:
        session.tried = lambda batch, fits: tried.append((batch, fits))
        found = session.memory()
    assert isinstance(found, Measurement), found
    return found, tried


@pytest.mark.slow
def test_the_best_remedy_and_the_largest_batch_are_known_afterwards(server: ForkServer, tmp_path: Path) -> None:
    found, tried = measured(server, tmp_path)

    advised = found.advised
    assert advised is not None
    assert advised.scheme == "offload"
    assert advised.needed_bytes is not None
    assert advised.needed_bytes < needed_bytes(found)
    assert advised.largest_batch is not None
    assert advised.largest_batch > 4096
    assert {(advised.largest_batch, True), (advised.largest_batch + 1, False)} <= {*tried}
    assert found.largest_batch is None, "it was not asked for, and gates do not see it"
    assert (tmp_path / "out").read_text().count("trains") == 1


@pytest.mark.slow
def test_where_not_even_the_weights_fit_no_batch_does(server: ForkServer, tmp_path: Path) -> None:
    found, _ = measured(server, tmp_path, limit=32 * MIB)

    assert found.advised is not None
    assert found.advised.largest_batch == 0


@pytest.mark.slow
def test_a_batch_that_the_data_has_not_leaves_the_answer_open(server: ForkServer, tmp_path: Path) -> None:
    found, _ = measured(server, tmp_path, rows=3 * 4096, limit=1024 * MIB)

    assert found.advised is not None
    assert found.advised.scheme == "offload"
    assert found.advised.largest_batch is None


@pytest.mark.parametrize(("seconds", "advised"), [(30.0, Advised(is_slow=True)), (10.0, Advised(scheme="remedy"))])
def test_what_would_take_long_is_not_simulated(
    make_record: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, advised: Advised
) -> None:
    def memory(session: followup.Session) -> Measurement:
        session.seconds = seconds
        found: Measurement = make_record().outcome
        return found

    monkeypatch.setattr(followup.bench.Session, "memory", memory)
    monkeypatch.setattr(followup.Session, "_remedied", lambda *_: Advised(scheme="remedy"))
    case = Case(model="train.py", batch_size=1, script=Script(target="train.py"), meter="simulated")

    assert followup.Session(case).memory().advised == advised
