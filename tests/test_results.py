"""What is committed under results/ and shown in the README is what the records say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actbench import experiment, recipe, store

ROOT = Path(__file__).parents[1]
FILES = sorted(file for file in (ROOT / "results").rglob("*.jsonl") if not file.name.endswith(".runs.jsonl"))
README = (ROOT / "README.md").read_text()
SHOWN = re.findall(r"<!-- (results/[\w-]+) -->\n((?:\|.*\n)+)", README)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_committed_tables_are_rendered_from_their_records(file: Path) -> None:
    found = store.read(file)

    assert found.notice is None
    for suffix, text in experiment.texts(found.records, recipe.load(file.parent.name).title).items():
        assert file.with_suffix(suffix).read_text() == text


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_committed_records_come_from_committed_code(file: Path) -> None:
    assert not any(record.versions.dirty for record in store.read(file).records)


def test_the_readme_shows_results() -> None:
    assert {folder for folder, _ in SHOWN} >= {"results/quickstart", "results/agreement", "results/fewbit-roberta"}


@pytest.mark.parametrize(("folder", "table"), SHOWN, ids=[folder for folder, _ in SHOWN])
def test_every_row_of_the_readme_stands_in_the_results(folder: str, table: str) -> None:
    committed = [cells_of(line) for file in (ROOT / folder).glob("*.md") for line in file.read_text().splitlines()]
    header, _, *rows = table.splitlines()

    assert any(cells_of(header) <= row for row in committed)
    for line in rows:
        assert any(cells_of(line) <= row for row in committed), line


def cells_of(line: str) -> set[str]:
    return {cell.strip() for cell in line.strip("|").split("|")}
