from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actbench.errors import StoreError
from actbench.report import kinds
from actbench.report.render import json_text
from actbench.report.store import Store, read_results, results_path
from actbench.tools.train.records import TrainingRun

MakeRun = Any


def test_runs_survive_and_the_last_of_a_case_counts(tmp_path: Path, make_run: MakeRun) -> None:
    file = tmp_path / "a" / "box.runs.jsonl"
    old, new, other = make_run(accuracy=0.1), make_run(accuracy=0.2), make_run(machine="elsewhere")
    with Store.opened(file, TrainingRun, new.machine) as opened:
        for run in (old, other, new):
            opened.append(run)

    with Store.opened(file, TrainingRun, new.machine) as again:
        assert again.find(old.case) == new
        assert not again.done(other.case.model_copy(update={"seed": 9}))
    assert read_results(file, TrainingRun).records == (new, other)


def test_runs_on_one_machine_with_another_gpu_are_others(tmp_path: Path, make_run: MakeRun) -> None:
    file = tmp_path / "box.runs.jsonl"
    old, new = make_run(accuracy=0.1, gpu="Tesla T4"), make_run(accuracy=0.2, gpu="NVIDIA H200")
    with Store.opened(file, TrainingRun, old.machine) as opened:
        opened.append(old)
    with Store.opened(file, TrainingRun, new.machine) as opened:
        assert opened.find(new.case) is None
        opened.append(new)

    with Store.opened(file, TrainingRun, old.machine) as opened:
        assert opened.find(new.case) == old
    assert read_results(file, TrainingRun).records == (old, new)


def test_a_half_written_line_is_left_out(tmp_path: Path, make_run: MakeRun) -> None:
    file = tmp_path / "box.runs.jsonl"
    with Store.opened(file, TrainingRun, make_run().machine) as opened:
        opened.append(make_run())
    with file.open("ab") as damaged:
        damaged.write(b'{"schema_version":1,"rec')

    with Store.opened(file, TrainingRun, make_run().machine) as again:
        assert "half-written" in str(again.notice)
        again.append(make_run(seed=1))

    assert len(read_results(file, TrainingRun).records) == 2


def test_two_processes_on_one_file_are_refused(tmp_path: Path, make_run: MakeRun) -> None:
    file = tmp_path / "box.runs.jsonl"
    with (
        Store.opened(file, TrainingRun, make_run().machine),
        pytest.raises(StoreError, match="another actbench process"),
        Store.opened(file, TrainingRun, make_run().machine),
    ):
        pass


def test_what_reads_the_files_of_a_sweep_leaves_runs_alone(tmp_path: Path) -> None:
    path = results_path(tmp_path, "digits", "amd-2.4-2c").with_suffix(".runs.jsonl")
    path.parent.mkdir(parents=True)
    path.touch()
    other = path.with_name("amd-2.4-2c.jsonl")
    other.touch()

    assert path == tmp_path / "digits" / "amd-2.4-2c.runs.jsonl"
    assert kinds.files_in([tmp_path]) == [other]


def test_json_holds_the_records(make_run: MakeRun) -> None:
    assert '"accuracy": 0.9' in json_text([make_run()])
