"""What is committed under results/ and shown on pages is what the records say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from actbench.model.measured import MeasuredRecord
from actbench.report import kinds, store
from actbench.report.render import markdown
from actbench.report.tables import report_tables
from actbench.report.tables.columns import CHOICES
from actbench.run import recipes, sweep
from actbench.tools.fit.records import FitRecord
from actbench.tools.fit.tables import FIT_TITLE, FITTED
from actbench.tools.train import recipe as runs
from actbench.tools.train.records import TrainingRun
from actbench.tools.train.tables import TRAINED

ROOT = Path(__file__).parents[1]
FILES = kinds.files_below(ROOT / "results")
RUNS = sorted((ROOT / "results").rglob("*.runs.jsonl"))
FITS = sorted((ROOT / "results").rglob("*.fit.jsonl"))
PAGES = "".join(page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
SHOWN = re.findall(r"<!-- (results/[\w./-]+) -->\n((?:\|.*\n)+)", PAGES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_committed_tables_are_rendered_from_their_records(file: Path) -> None:
    found = store.read_results(file)

    assert found.notice is None
    name = file.parent.name
    title = recipes.load(name).title if recipes.files_of(name) else name  # a benchmark's records have no recipe
    for suffix, text in sweep.MEASURED.texts(found.records, title).items():
        assert file.with_suffix(suffix).read_text() == text


@pytest.mark.parametrize("file", RUNS, ids=lambda file: str(file.relative_to(ROOT)))
def test_committed_tables_of_training_runs_are_rendered_from_their_records(file: Path) -> None:
    found = store.read_results(file, TrainingRun)

    for suffix, text in TRAINED.texts(found.records, runs.load(file.parent.name).title).items():
        assert file.with_suffix(suffix).read_text() == text


@pytest.mark.parametrize("file", FITS, ids=lambda file: str(file.relative_to(ROOT)))
def test_committed_tables_of_fits_are_rendered_from_their_records(file: Path) -> None:
    found = store.read_results(file, FitRecord)

    for suffix, text in FITTED.texts(found.records, FIT_TITLE).items():
        assert file.with_suffix(suffix).read_text() == text
    assert not any(record.versions.dirty for record in found.records)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_committed_records_come_from_committed_code(file: Path) -> None:
    assert not any(record.versions.dirty for record in store.read_results(file).records)


def test_pages_show_results() -> None:
    named = {"quickstart", "agreement", "fewbit-roberta", "t4-largest", "actnn-memory", "finetune-8b", "shard-70b"}
    assert {folder for folder, _ in SHOWN} >= {f"results/{name}" for name in named}


@pytest.mark.parametrize(("folder", "table"), SHOWN, ids=[folder for folder, _ in SHOWN])
def test_every_row_of_a_page_stands_in_the_results(folder: str, table: str) -> None:
    texts = [file.read_text() for file in (ROOT / folder).glob("*.md")]
    if (ROOT / "recipes" / f"{Path(folder).name}.toml").exists():
        records, _ = store.read_all(kinds.files_in([ROOT / folder]), MeasuredRecord)
        texts += map(markdown, report_tables(records, "", tuple(CHOICES)))
    committed = [cells_of(line) for text in texts for line in text.splitlines()]
    header, _, *rows = table.splitlines()

    assert any(cells_of(header) <= row for row in committed)
    for line in rows:
        assert any(cells_of(line) <= row for row in committed), line


def test_the_start_page_shows_what_quickstart_prints() -> None:
    [shown] = [table for folder, table in SHOWN if folder == "results/quickstart"]
    recipe = recipes.load("quickstart")
    records, _ = store.read_all(kinds.files_in([ROOT / "results" / "quickstart"]), MeasuredRecord)
    [table] = report_tables(records, recipe.title, recipe.columns)

    assert recipe.columns
    assert shown in markdown(table)


def test_the_picture_of_the_readme_is_drawn_from_the_records() -> None:
    """``make pages`` writes it."""
    drawn = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "picture.py"], capture_output=True, text=True, check=True
    )

    assert (ROOT / "docs" / "images" / "memory.svg").read_text() == drawn.stdout


def cells_of(line: str) -> set[str]:
    return {cell.strip() for cell in line.strip("|").split("|")}


def test_what_a_sweep_in_a_clone_measures_is_no_change_of_the_clone() -> None:
    def ignored(file: str) -> int:
        return subprocess.run(["git", "check-ignore", "--quiet", file], cwd=ROOT).returncode

    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert ignored("results/quickstart/somebodys-machine.jsonl") == 0
    assert ignored("results/own/somebodys-machine.md") == 0
    assert ignored("results/quickstart/amd-epyc-2c.jsonl") == 1  # it is tracked
