"""A sweep whose cases all have rows starts no process and imports no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from withouttorch import NOTHING_STARTED

from actbench import machine, scheme as schemes
from actbench.model.declared import spelled
from actbench.model.measured import MeasuredRecord
from actbench.report.kinds import MEASURED
from actbench.run import recipes
from actbench.run.progress import Progress
from actbench.run.recipes import Recipe
from actbench.run.stored import stored_results

MakeRecord = Callable[..., MeasuredRecord]
RECIPE = """
title = "What is stored?"
[workload]
model = "tiny-bert"
batch_size = [1, 2]
[measure]
meters = ["simulated"]
[[scheme]]
spec = "adam8bit"
[[scheme]]
spec = "checkpoint+fewbit:3,functions=gelu/relu"
"""
STORED = ("exact", "adam8bit:torchao", "fewbit:3,functions=gelu/relu+checkpoint")


def stored(folder: Path, make_record: MakeRecord, *, without: int = 0, failure: str | None = None) -> Recipe:
    """Write a recipe, and a row of each of its cases but the last ones, in a folder; return the recipe."""
    (folder / "mine.toml").write_text(RECIPE)
    recipe = Recipe.load(folder / "mine.toml")
    with MEASURED.opened("mine", folder) as opened:
        rows = [
            make_record(scheme, model="tiny-bert", batch_size=size, meter="simulated", failure=failure)
            for size in (1, 2)
            for scheme in STORED
        ]
        of_cases = {(each.case.batch_size, spelled(each.case.scheme)): each.case for each in recipe.cases()}
        for row in rows[: len(rows) - without]:
            case = of_cases[row.case.batch_size, spelled(row.case.scheme)]
            case = case.model_copy(update={"scheme": row.case.scheme, "device_profile": "cuda-16gib"})
            opened.append(row.model_copy(update={"case": case, "machine": machine.machine()}))
    return recipe


def found(recipe: Recipe, folder: Path, *, retry_failed: bool = False, timelines: bool = False) -> int | None:
    settled = {"retry_failed": retry_failed, "timelines": timelines, "progress": Progress()}
    result = stored_results(recipe.name, recipe.title, recipe.cases, folder, **settled)
    return None if result is None else result.summary.skipped


def test_nothing_is_started_where_all_is_stored(tmp_path: Path, make_record: MakeRecord) -> None:
    stored(tmp_path, make_record)
    command = [sys.executable, "-c", NOTHING_STARTED, "sweep", tmp_path / "mine.toml", "-o", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert ended.returncode == 0, ended.stderr
    assert "0 measured, 0 failed, 6 taken from the results file" in ended.stderr
    assert "What is stored?" in ended.stdout


def test_all_rows_count_and_each_case_needs_one(tmp_path: Path, make_record: MakeRecord) -> None:
    recipe = stored(tmp_path, make_record)
    assert found(recipe, tmp_path) == 6
    assert found(recipe, tmp_path, timelines=True) is None
    assert found(recipe, tmp_path / "nowhere") is None


@pytest.mark.parametrize("without", [1, 6])
def test_a_case_that_is_left_is_for_the_sweep(tmp_path: Path, make_record: MakeRecord, without: int) -> None:
    assert found(stored(tmp_path, make_record, without=without), tmp_path) is None


def test_failed_rows_count_unless_they_are_to_be_tried_again(tmp_path: Path, make_record: MakeRecord) -> None:
    recipe = stored(tmp_path, make_record, failure="too large")
    assert found(recipe, tmp_path) == 6
    assert found(recipe, tmp_path, retry_failed=True) is None


def test_schemes_are_spelled_without_torch_as_records_have_them() -> None:
    of_recipes = [row.spec for name in recipes.names() for row in recipes.load(name).scheme]
    known = {text: spelled(text) for text in dict.fromkeys(of_recipes)}

    assert len([text for text, parts in known.items() if parts is None]) < 0.05 * len(known)
    for text, parts in known.items():
        if parts is not None:
            assert parts == tuple(sorted(schemes.build(text).spec.split("+"))), text


@pytest.mark.slow
def test_a_script_whose_rows_are_stored_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nm = torch.nn.Linear(8, 8).cuda()\no = torch.optim.AdamW(m.parameters(), 0.1)\n"
        "for _ in range(9):\n    m(torch.randn(2, 8, device='cuda')).sum().backward()\n    o.step()\n"
    )
    arguments = ["run", "-s", "adam8bit", "-o", "kept", "train.py"]
    first = [sys.executable, "-P", "-m", "actbench", *arguments]
    ended = [
        subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        for command in (first, [sys.executable, "-c", NOTHING_STARTED, *arguments])
    ]

    assert [each.returncode for each in ended] == [0, 0], ended
    assert "0 measured, 0 failed, 2 taken from the results file" in ended[1].stderr
