"""A user's folder, and stand-ins for the work of commands, which leave all that is before and after it as it is."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import pytest

from actbench.machine import provenance
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.tools.convert.report import ConversionReport
from actbench.tools.train.records import Evaluation, Trained, TrainingCase

ROOT = Path(__file__).parents[2]
SMALL = Case(model="tiny-roberta", batch_size=1, sequence_length=8, device_profile="rtx-4090")
TRAINED = Trained(
    metric="accuracy",
    steps=2,
    losses=(1.0, 0.5),
    step_seconds=(0.1, 0.1),
    evaluations=(Evaluation(step=2, loss=0.5, accuracy=0.5),),
    weights_bytes=1,
    activation_bytes=2,
    peak_bytes=3,
)
TRAIN = """
import torch

class Snake(torch.nn.Module):
    def forward(self, x):
        return x + torch.sin(x) ** 2

def build():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), Snake(), torch.nn.Linear(32, 10))

    def make_batch(n):
        return {"x": torch.randn(n, 16), "y": torch.randint(0, 10, (n,))}

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    return model, make_batch, loss
"""
ACTIVATIONS = """
import torch

def snake(x):
    return x + torch.sin(x) ** 2

class Snake(torch.nn.Module):
    def forward(self, x):
        return snake(x)
"""
PROFILE = {"gib": 4, "fp32": 0.1, "bandwidth": 20, "link": 10, "launch": 1}


@pytest.fixture(scope="session")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models as ``save_pretrained`` writes them."""
    from transformers import BertConfig, BertForMaskedLM, WhisperConfig

    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=32)).save_pretrained(folder / "my-model")
    speech = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99, "max_source_positions": 50}
    WhisperConfig(**speech, architectures=["WhisperForConditionalGeneration"]).save_pretrained(folder / "my-whisper")
    return folder


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _models: Path) -> Path:
    """Return the current folder, with files that the documentation calls the user's, and the committed results."""
    profile = "".join(f"{name} = {value}\n" for name, value in PROFILE.items())
    for name, text in {"train.py": TRAIN, "generate.py": TRAIN, "acts.py": ACTIVATIONS, "here.toml": profile}.items():
        (tmp_path / name).write_text(text)
    quickstart = next((ROOT / "results" / "quickstart").glob("*.jsonl"))
    for name in ("old.jsonl", "new.jsonl", "A", "B"):
        shutil.copy(quickstart, tmp_path / name)
    for name in ("results", "results-of-main"):
        shutil.copytree(ROOT / "results", tmp_path / name)
        for fits in (tmp_path / name / "fit").rglob("*.fit.jsonl"):
            fits.rename(fits.with_name("another.fit.jsonl"))  # no made-up fit goes on from one of this machine
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(_models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@functools.cache
def small() -> tuple[Measurement, str, bytes]:
    """Return the measurement of a small model, with all that commands show of one, its ledgers and its snapshot."""
    from actbench.measuring import bench, timelines

    found: Measurement = timelines.Session(SMALL).memory()
    return found, timelines.itemize_all(f"[{SMALL.model_dump_json()}]"), bench.snapshot(SMALL)


def calibrated(device: str, **_: Any) -> Any:
    from actbench.simulator.profiles import DeviceTable, HostTable
    from actbench.tools.calibrate.calibrate import Calibrated

    kinds = {"matmul": {"fp32": 0.9, "memory": 1, "ramp": 1}}
    return Calibrated(
        DeviceTable(**PROFILE, host=dict.fromkeys(HostTable.model_fields, 1), efficiencies=kinds), device, ()
    )


def trained(cases: Sequence[TrainingCase]) -> Iterator[tuple[TrainingCase, Trained]]:
    for case in cases:
        yield case, TRAINED


class NoProcesses:
    """Stands for a fork server from which nothing is forked."""

    def __init__(self, *_: object) -> None: ...

    def ready(self, also: Sequence[str] = (), after_first: Sequence[str] = ()) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tasks_here: None) -> None:
    """Make up what commands measure, simulate, train and time, here and on a cluster; let a GPU be there."""
    from actbench import workload as workloads
    from actbench.measuring import bench, meters, timelines
    from actbench.run import local, processes
    from actbench.run.executor import Handle
    from actbench.tools.calibrate import calibrate as calibration
    from actbench.tools.cluster.executor import Cluster
    from actbench.tools.convert import workload
    from actbench.tools.fit import fit as fitting
    from actbench.tools.train import comparison
    from actbench.workload import folder

    steps = importlib.import_module("fakefit")
    found, ledgers, pickle = small()

    def outcome(case: Case) -> Measurement:
        made: Measurement = steps.Session(case.model_copy(update={"meter": "simulated"})).memory()
        estimated = made.estimated.model_copy(update={"by_operator": found.estimated.by_operator})
        told = {"timeline": found.timeline, "estimated": estimated, "largest_batch": 7}
        return made.model_copy(update=told)

    def submit(self: object, cases: Sequence[Case], on: object, tell: Any) -> Handle:
        for case in cases:
            tell((case, outcome(case), provenance("")))
        ended: Future[None] = Future()
        ended.set_result(None)
        return Handle(ended, lambda: None)

    def converted(case: Case, output: Path | None, **_: bool) -> ConversionReport:
        workloads.load_workload(case)
        told = {"sites": (), "unreached": (), "bytes_before": 2, "bytes_after": 1, "warnings": (), "seconds": 1.0}
        return ConversionReport(case=case, folder=output, weights_origin="random", built=None, **told)

    def itemized(text: str) -> str:
        return json.dumps(json.loads(ledgers) * len(json.loads(text)))

    stands = {
        (local, "ForkServer"): NoProcesses,
        (processes, "ForkServer"): NoProcesses,
        (local.LocalExecutor, "submit"): submit,
        (Cluster, "start"): lambda self, work: local.LocalExecutor(work),
        (folder, "download"): lambda repository, **_: Path("my-model"),
        (fitting, "meter_of"): lambda profile: "cuda" if profile.is_cuda else "cpu",
        (meters, "check_meter"): lambda name: None,
        (timelines, "itemize_all"): itemized,
        (bench, "snapshot"): lambda case: pickle,
        (workload, "convert_workload"): converted,
        (comparison.Training, "outcomes"): lambda self, cases: trained(cases),
        (calibration, "calibrate"): calibrated,
    }
    for (owner, name), stand in stands.items():
        monkeypatch.setattr(owner, name, stand)
