"""What loaders would still give after a run of a few steps is looked at, and told beside the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainings import TRAINING, RunScript
from wholeruns import TRAINER

from actbench.model.measured import Measurement
from actbench.tools.script.ahead import scan
from actbench.tools.script.answers.verdict import in_short

LATE = TRAINING.replace(
    "DataLoader(TensorDataset(torch.randn(4096, 256)), batch_size=512, shuffle=True, num_workers=2)",
    "DataLoader(range(256), batch_size=16, collate_fn=lambda rows: [torch.randn(1536 if 200 in rows else 512, 256)])",
)
WAITING = TRAINING.replace(
    "optimizer = ", "later = DataLoader(TensorDataset(torch.randn(4096, 256)), batch_size=2048)\noptimizer = "
)


@pytest.mark.parametrize(
    ("text", "larger", "rows", "words"),
    [
        (TRAINING, None, None, "to spare"),
        (
            LATE,
            3.0,
            None,
            "later batches of its data are 3.0 times as large as those that ran: --whole runs them",
        ),
        (WAITING, None, 2048, "a loader that did not run makes batches of 2048 rows: --whole runs them"),
    ],
    ids=["all alike", "a larger one late", "an evaluation"],
)
def test_what_did_not_run_is_told_with_the_verdict(
    text: str, larger: float | None, rows: int | None, words: str, run: RunScript, make_record: object
) -> None:
    found = run(text)

    assert isinstance(found, Measurement)
    assert found.built is not None
    assert (found.built.larger_batches, found.built.waiting_rows) == (larger, rows)
    assert found.built.stopped_after == 3
    record = make_record(model="train.py")  # type: ignore[operator]
    assert in_short(record.model_copy(update={"outcome": found}))[0].endswith(f"{words}.")


@pytest.mark.slow
def test_a_trainer_that_has_not_evaluated_has_its_rows(run: RunScript, tmp_path: Path) -> None:
    found = run(TRAINER.replace("OUT", str(tmp_path / "written")))

    assert isinstance(found, Measurement)
    assert found.built is not None
    assert (found.built.batch_size, found.built.waiting_rows) == (8, 32)


def test_a_scan_ends_where_batches_are_alike_and_reads_nothing_that_is_only_iterated() -> None:
    made: list[int] = []

    def load(index: list[int]) -> torch.Tensor:
        made.append(len(index))
        return torch.zeros(len(index))

    alike = DataLoader(TensorDataset(torch.zeros(4096)), 8).batch_sampler
    assert len(scan(iter(alike), load, 60.0).batches) == len(made) == 64
    assert scan(iter([[None], [None]]), load, 60.0).sizes == []
    assert scan(iter(alike), load, 0.0).is_cut
    assert len(scan(iter(alike), load, 60.0, 20).batches) == 3
