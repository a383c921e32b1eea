from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import hypothesis
import pytest

# Two workers share the cores: a thread of OpenMP that spins while it waits takes its core from the other worker. OpenMP
# reads this once, when torch is imported, so it is set before that; workers and commands inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from actbench.cli import main
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.provenance import Machine, Versions
from actbench.model.records import Case, Failure

MakeRecord = Callable[..., MeasuredRecord]


# Tests share their processors: how long an example takes says nothing.
hypothesis.settings.register_profile(
    "shared processors", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared processors")


_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run be limited in time, as on a machine of which nobody knows how busy it is."""
    parser.addoption("--minutes", type=float, help="begin no test after so many minutes; those left are skipped")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage while libraries are imported: there is none among their millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share the parameters of tests with ``sampled(fast=F, slow=S)`` out: F stay fast, S are slow, others exhaustive.

    Digests of their names choose: such a sample mixes the kinds, and a further parameter hardly changes it. What is
    chosen among is what was collected: a parameter that is named alone is in its own sample. Tests on a GPU are none of
    these kinds.
    """
    tests: dict[str, list[tuple[pytest.Item, pytest.Mark]]] = {}
    for item in items:
        is_marked = any(item.get_closest_marker(kind) for kind in ("slow", "exhaustive", "gpu"))
        if not is_marked and (mark := item.get_closest_marker("sampled")):
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, mark))
    for found in tests.values():
        found.sort(key=lambda each: hashlib.sha256(each[0].name.encode()).digest())
        for place, (item, mark) in enumerate(found):
            fast, slow = mark.kwargs.get("fast", 0), mark.kwargs["slow"]
            if place >= fast:
                item.add_marker("slow" if place < fast + slow else "exhaustive")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests for which no time is left, and those of what newer versions of torch do, where an old one is."""
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - _BEGAN > 60 * minutes:
        pytest.skip(f"not begun after {minutes:g} minutes")
    mark = item.get_closest_marker("newer_torch")
    if mark is None:
        return
    import torch

    if torch.__version__ < (2, 12):
        pytest.skip(f"torch {torch.__version__}: {mark.args[0]}")


@pytest.fixture(scope="session")
def _thawed_at_the_end() -> Iterator[None]:
    """Let Python find all objects when it ends: extensions report those that are still alive then."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_not_searched_for_garbage(_thawed_at_the_end: None) -> None:
    """Meters and trainers collect garbage in each run, which takes 0.4 s among the objects of all the libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def operators_run_once() -> Iterator[None]:
    """Recall in each simulation of a file what operators did in those before, which tests/simulator compares."""
    from actbench.simulator.cachingmode import starting_from  # which imports torch

    with starting_from({}):
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_width() -> None:
    """Forget the width of the terminal that xdist tells its workers of."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session", autouse=True)
def _seeds_wait_for_no_device() -> Iterator[None]:
    """Let ``torch.manual_seed`` leave out devices that are not there.

    It notes the seed for each of them together with a formatted traceback, which takes longer than most tests.
    """
    torch = sys.modules.get("torch")  # which tests of results alone do not import
    with pytest.MonkeyPatch.context() as patched:
        for kind in (torch.cuda, torch.xpu, torch.mtia) if torch else ():
            if not kind.is_available():
                patched.setattr(kind, "_lazy_call", lambda *_, **__: None)
        yield


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """Return a maker of records: fields of the case and of the measurement by name, the rest as for any machine."""

    def make(
        scheme: str = "exact",
        *,
        failure: str | None = None,
        machine: str = "box",
        gpu: str | None = None,
        dirty: bool = False,
        label: str | None = None,
        published: tuple[Any, ...] = (),
        **fields: Any,
    ) -> MeasuredRecord:
        case = {name: fields.pop(name) for name in Case.model_fields if name in fields}
        outcome: Measurement | Failure = Measurement(
            **{"weights_bytes": 400, "activation_bytes": 600, "peak_bytes": 1000, **fields}
        )
        if failure is not None:
            outcome = Failure(reason="out-of-memory", message=failure)
        return MeasuredRecord(
            recipe="made",
            case=Case(**{"model": "tiny", "batch_size": 8, "scheme": scheme, **case}),
            outcome=outcome,
            machine=Machine(
                name=machine, system="Linux", processor="a processor", cores=2, memory_bytes=8 * 1024**3, gpu=gpu
            ),
            versions=Versions(actbench="0.1.0", python="3.11.9", torch="2.11.0", commit="0123456789", dirty=dirty),
            command="actbench sweep made",
            recorded_at="2026-01-02T03:04:05+00:00",
            label=label,
            published=published,
        )

    return make


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


class Cli:
    """Calls the entry point as the installed command does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def __call__(self, *arguments: object) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["actbench", *map(str, arguments)])
        self._capfd.readouterr()
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        out, err = self._capfd.readouterr()
        return Ended(status, out, err)

    def refused(self, *arguments: object, naming: str) -> str:
        """Run a command that must end with status 2 and one message, and return the message."""
        ended = self(*arguments)
        assert ended.status == 2, ended
        assert "Traceback" not in ended.err
        assert naming in ended.err
        return ended.err


class Refusals:
    """Asks for what must be refused with one message, of conversions and of ledgers."""

    def __init__(self, cli: Cli) -> None:
        self._cli = cli

    def __call__(self, model: str, *, naming: str, scheme: str = "fewbit:3") -> list[str]:
        """Convert a model and list what it saves, and return the messages."""
        from actbench.errors import ActbenchError, shortened
        from actbench.tools.convert.workload import convert_workload

        with pytest.raises(ActbenchError) as refused:
            convert_workload(Case(model=model, scheme=scheme, batch_size=2), None)
        message = shortened(str(refused.value))
        assert naming in message
        return [message, self._cli.refused("measure", model, "-s", scheme, "--ledger", "-b", "2", naming=naming)]


class TasksHere:
    """Stands for ``Tasks`` of the runner, whose processes take seconds to start: calls functions here."""

    said, server = "", None

    def __init__(self, module: str, preload: Sequence[str] = (), server: object = None) -> None:
        self._module = importlib.import_module(module)

    def call(self, function: str, text: str, **_: object) -> str:
        answer: str = getattr(self._module, function)(text)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def tasks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands do their tasks in this process."""
    monkeypatch.setattr("actbench.run.tasks.Tasks", TasksHere)


class NoServer:
    """Stands for the fork server of a command that is refused before its first case."""

    def __init__(self, *_: object) -> None:
        pass

    def fork(self) -> None:
        pytest.fail("a process was begun")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def looked_up_here(monkeypatch: pytest.MonkeyPatch, tasks_here: None) -> None:
    """Let a command that is refused look up its models in this process: its server takes seconds to start."""
    monkeypatch.setattr("actbench.run.processes.ForkServer", NoServer)


@pytest.fixture
def refused_as_model(cli: Cli, tasks_here: None) -> Refusals:
    """Return what asks for a model: ``refused_as_model("tiny-bert@num_labels=0", naming="num_labels")``."""
    return Refusals(cli)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Return the command line, run in this process: ``cli("sweep", "resnet50").status``."""
    return Cli(monkeypatch, capfd)


class Stepped:
    """Makes a step of a setup by a meter, as a bench does; the loss is the mean square of the output."""

    def __call__(self, meter: Any, module: Any, batch: Any, loss: Any = None, make_optimizer: Any = None) -> Any:
        import torch

        from actbench.scheme.setup import TrainingSetup, TrainStep

        loss = loss or (lambda module, batch: module(batch["x"]).square().mean())
        make_optimizer = make_optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3))
        setup = meter.adopt(TrainingSetup(module, loss, make_optimizer))
        with meter.active():
            return TrainStep(setup, meter.place(batch()))


@pytest.fixture
def step_of() -> Stepped:
    """Return what makes a step: ``step_of(meter, module, batch)``."""
    return Stepped()


@pytest.fixture
def mlp() -> Any:
    """Linear 128 to 512, GELU, Linear 512 to 128."""
    from torch import nn

    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))


@pytest.fixture
def rows() -> Callable[[], Any]:
    """A batch of 64 rows of 128 float32."""
    import torch

    return lambda: {"x": torch.randn(64, 128)}


EVIL = "import pathlib\npathlib.Path({witness!r}).write_text(__name__)\nraise SystemExit('code of the folder ran')\n"
SMALL_RECIPE = """
title = "Which?"
[workload]
model = "tiny-roberta"
batch_size = 1
sequence_length = 8
[[scheme]]
spec = "fewbit:3"
"""


@pytest.fixture
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that is written if code of the current folder runs.

    That folder has a Python file in the name of every module that there is, and a recipe, ``mine.toml``.
    """
    folder, witness = tmp_path / "downloaded", tmp_path / "witness"
    folder.mkdir()
    installed = [name for name in importlib.metadata.packages_distributions() if name.isidentifier()]
    for name in {*sys.stdlib_module_names, *installed, "actbench", "sitecustomize", "usercustomize"}:
        (folder / f"{name}.py").write_text(EVIL.format(witness=str(witness)))
    (folder / "mine.toml").write_text(SMALL_RECIPE)
    monkeypatch.chdir(folder)
    return witness
