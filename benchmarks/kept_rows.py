"""Rows that a benchmark keeps by model: a JSON file, and the table that is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def keep(
    row: Mapping[str, Any],
    folder: Path,
    name: str,
    models: Iterable[str],
    markdown: Callable[[Sequence[Mapping[str, Any]]], str],
) -> None:
    """Put the row of a model in place of its older one, in the order of the models, and write both files.

    Args:
        row: The row, whose ``model`` is one of the models.
        folder: Where the files are; it is made unless it exists.
        name: Of both files, without suffix.
        models: All models.
        markdown: Makes the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, order = folder / f"{name}.json", list(models)
    older = json.loads(path.read_text()) if path.exists() else []
    rows = [*(each for each in older if each["model"] != row["model"]), row]
    rows.sort(key=lambda each: order.index(each["model"]))
    path.write_text(json.dumps(rows, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(rows))
