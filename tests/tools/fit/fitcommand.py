"""Words of the command fit, and the records that it leaves."""

from __future__ import annotations

from pathlib import Path

from actbench.report import store
from actbench.tools.fit.records import FitRecord

HERE = str(Path(__file__).parent)
AMONG = [word for name in ("checkpoint", "gact:L2", "chunked_loss:8") for word in ("--scheme", name)]
STEP = ("fit", "tiny-llama", "--device-profile", "rtx-4090", "-b", "4", "--sequence-length", "8")


TRAINED_ALL = ("--scheme", "checkpoint", "--scheme", "adam8bit")
DEEP = "tiny-llama@num_hidden_layers=16"


def records_below(folder: Path) -> tuple[FitRecord, ...]:
    (file,) = folder.rglob("*.fit.jsonl")
    return store.read_results(file, FitRecord).records
