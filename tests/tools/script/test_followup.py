"""After a script, what is asked next is simulated: the best remedy, and the largest batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import MeasurementError
from actbench.model.measured import Advised, Measurement, RunEvent
from actbench.model.records import Built, Case, Failure
from actbench.model.scripts import Script
from actbench.report.advice import needed_bytes
from actbench.run.isolated import IsolatedSession
from actbench.run.processes import ForkServer
from actbench.tools.script import bench, followup, fullanswer, trials
from actbench.tools.script.answers.suggestions import run_bytes, suggestions
from actbench.units import MIB

TRAIN = """
import torch
from torch import nn

print("trains")

def main():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.zeros(2**16, 1024))
    for (x,) in torch.utils.data.DataLoader(data, batch_size=4096):
        net(x.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

main()  # and its model is gone when it ends
"""
TRIED = 8192  # by patientfollowup, which is not imported here: it changes what it stands for
CASE = Case(model="train.py", batch_size=1, script=Script(target="train.py"), meter="simulated")


CHOOSES = """
import torch
from torch import nn

net, head = nn.Linear(64, 1024).cuda(), nn.Linear(1024, 4096).cuda()
optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2**16, 64)), batch_size=2048):
    y = net(x.cuda())
    head(y[CHOSEN]).relu().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
Measure = Callable[..., tuple[Measurement, list[tuple[int, bool]]]]
Search = Callable[[Advised], Advised] | None


def remedied(session: object, found: Measurement, advised: Advised, limit: float, search: Search) -> Advised:
    """Advise a scheme without a simulation of it."""
    advised = advised.model_copy(update={"scheme": "remedy"})
    return advised if search is None else search(advised)


@pytest.fixture
def follow(tmp_path: Path) -> Measure:
    """Return what measures a script with all that is asked next, with time for it, and the batches that were tried."""

    def measured(text: str, limit: int = 256 * MIB, **options: Any) -> tuple[Measurement, list[tuple[int, bool]]]:
        file, tried = tmp_path / "train.py", list[tuple[int, bool]]()
        file.write_text(text)
        script = Script(target=str(file), **options)
        limited = {"device_profile": "rtx-4090", "memory_limit_bytes": limit, "script": script}
        for name in ("out", "err"):
            (tmp_path / name).touch()
        with pytest.MonkeyPatch.context() as patched:
            patched.syspath_prepend(str(Path(__file__).parent))
            with (
                ForkServer("patientfollowup") as server,
                IsolatedSession(server, CASE.model_copy(update=limited), 300.0, printed=str(tmp_path)) as session,
            ):
                session.tried = lambda batch, fits: tried.append((batch, fits))
                found = session.memory()
        assert isinstance(found, Measurement), found
        return found, tried

    return measured


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_the_best_remedy_and_the_largest_batch_are_known_afterwards(
    follow: Measure, tmp_path: Path, whole: bool
) -> None:
    found, tried = follow(TRAIN, whole=whole)

    advised = found.advised
    assert advised is not None
    assert advised.scheme == suggestions(found)[0].scheme
    assert advised.needed_bytes is not None
    assert advised.needed_bytes < run_bytes(found)
    assert (advised.largest_batch, tried) == (TRIED, [(TRIED, False)])
    assert found.largest_batch is None, "it was not asked for, and gates do not see it"
    assert (tmp_path / "out").read_text().count("trains") == 1
    assert bool(found.events) == whole


@pytest.mark.slow
def test_what_is_expected_is_a_run_in_which_half_is_chosen(follow: Measure) -> None:
    bound, _ = follow(CHOOSES.replace("CHOSEN", "y[:, 0] > 0"), limit=2048 * MIB)
    known, _ = follow(CHOOSES.replace("CHOSEN", "torch.arange(1024, device='cuda')"), limit=2048 * MIB)

    assert bound.at_most
    assert not known.at_most
    assert known.expected_bytes is None
    assert bound.expected_bytes == pytest.approx(needed_bytes(known), rel=0.03)
    assert needed_bytes(bound) > 1.3 * needed_bytes(known)


def test_a_trial_is_ended_after_its_time() -> None:
    def sleeps(finish: object) -> Measurement:
        time.sleep(60)
        raise AssertionError

    began = time.monotonic()
    found = trials.Forked(sleeps).outcome(0.3)

    assert isinstance(found, Failure)
    assert (found.reason, found.message) == ("timeout", "it was ended after 300 ms")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("seconds", "advised"),
    [
        (30.0, Advised(is_slow=True, limit_seconds=20.0)),
        (10.0, Advised(scheme="remedy", limit_seconds=20.0)),
        (5.0, Advised(scheme="remedy", largest_batch=40)),
    ],
)
def test_what_would_take_long_is_not_simulated(
    make_record: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, advised: Advised
) -> None:
    def memory(session: bench.Session) -> Measurement:
        session.seconds = seconds
        found: Measurement = make_record().outcome
        return found

    monkeypatch.setattr(bench.Session, "memory", memory)
    monkeypatch.setattr(followup.Session, "_remedied", remedied)
    searched = Advised(scheme="remedy", largest_batch=40)
    monkeypatch.setattr(followup.Session, "_searched", lambda *_: searched)

    assert followup.Session(CASE).memory().advised == advised
    whole = CASE.model_copy(update={"script": Script(target="train.py", whole=True)})
    assert followup.Session(whole).memory().advised == searched, "which runs longer anyway"


def test_a_full_answer_takes_the_time_of_the_case(make_record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(session: bench.Session) -> Measurement:
        session.seconds = 90.0
        found: Measurement = make_record().outcome
        return found

    monkeypatch.setattr(bench.Session, "memory", memory)
    monkeypatch.setattr(followup.Session, "_remedied", remedied)
    monkeypatch.setattr(
        followup.Session, "_searched", lambda session, found, advised: advised.model_copy(update={"largest_batch": 40})
    )
    session = fullanswer.Session(CASE)
    session.ends_at = time.monotonic() + 600
    advised = session.memory().advised

    assert advised is not None
    assert advised.largest_batch == 40
    assert advised.limit_seconds == pytest.approx(595, abs=5)
    session.ends_at = time.monotonic() + 60
    assert session.memory().advised.is_slow, "no time is left for one more"


def test_a_search_that_fails_or_takes_long_leaves_the_answer_open(
    make_record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MeasurementError("no loader makes such batches")

    built = Built(model_class="Net", batch_size=16)
    own = make_record().outcome.model_copy(update={"built": built, "memory_limit_bytes": 10})
    monkeypatch.setattr(followup, "largest_batch", fails)

    assert followup.Session(CASE)._searched(own, Advised()) == Advised()
    assert followup.Session(CASE)._searched(own.model_copy(update={"built": None}), Advised()) == Advised()
    monkeypatch.setattr(followup, "SEARCH_SECONDS", 0.0)
    assert followup.Session(CASE)._searched(own, Advised()) == Advised(is_search_slow=True)


def test_where_not_even_the_weights_fit_the_largest_batch_is_none(
    make_record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(rows: int) -> Measurement:
        built = Built(model_class="Net", batch_size=rows)
        found: Measurement = make_record(peak_bytes=1000 + rows, built=built).outcome
        return found.model_copy(update={"memory_limit_bytes": 100, "over_limit_bytes": 900 + rows})

    monkeypatch.setattr(trials.Forked, "__init__", lambda trial, run: vars(trial).update(run=run))
    monkeypatch.setattr(trials.Forked, "outcome", lambda trial, seconds: trial.run(lambda found: None))
    found = trials.largest_batch(lambda rows, finish: outcome(rows), outcome(16), 100, lambda rows, fits: None)

    assert (found.batch_size, found.predicted) == (0, 0)


def test_a_search_after_an_evaluation_begins_with_what_steps_reserve(
    make_record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(batch: int, **more: Any) -> Measurement:
        peak = 100 + 10 * batch
        fields = {"peak_bytes": peak, "reserved_bytes": peak * 5 // 4, "memory_limit_bytes": 1_000, **more}
        found: Measurement = make_record(weights_bytes=1, activation_bytes=1, **fields).outcome
        return found.model_copy(update={"over_limit_bytes": max(0, found.reserved_bytes - 1_000) or None})

    class Ran:
        def __init__(self, run: Callable[[Any], Measurement]) -> None:
            self._run = run

        def outcome(self, seconds: float | None) -> Measurement:
            return self._run(None)

    monkeypatch.setattr(trials, "Forked", Ran)
    tried: list[int] = []
    evaluation = RunEvent(part="evaluation", peak_bytes=900, reserved_bytes=950)
    own = of(8, reserved_bytes=950, built=Built(model_class="Net", batch_size=8), events=(evaluation,))

    found = trials.largest_batch(lambda batch, _: of(batch), own, 1_000, lambda batch, fits: tried.append(batch))

    assert found.batch_size == 70
    assert tried == [16, 70, 71]


def test_a_search_that_its_time_has_ended_tells_what_fits(make_record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(run: object, own: object, limit: object, tried: Callable[[int, bool], object], *_: object) -> None:
        for batch, fits in ((32, True), (96, False), (64, True)):
            tried(batch, fits)
        raise MeasurementError("it was ended")

    built = Built(model_class="Net", batch_size=16)
    own = make_record().outcome.model_copy(update={"built": built, "memory_limit_bytes": 10})
    monkeypatch.setattr(followup, "largest_batch", ends)
    monkeypatch.setattr(followup, "SEARCH_SECONDS", 0.0)

    assert followup.Session(CASE)._searched(own, Advised()) == Advised(is_search_slow=True, fitting_batch=64)
