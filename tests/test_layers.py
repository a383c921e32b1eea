"""Who may import whom: the table below is the documentation of the layers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "actbench"

# Each layer may import those that stand in its set, and itself.
WORDS = {"errors", "units", "records", "spec"}
REPORTING = WORDS | {
    "axes",
    "mistakes",
    "sections",
    "recipe",
    "lines",
    "store",
    "timing",
    "values",
    "entries",
    "columns",
    "notes",
    "tables",
    "cells",
    "render",
    "screen",
    "exports",
    "limits",
    "compare",
}
SETUP = WORDS | {"training", "fake", "hostmemory"}
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "records": set(),
    "spec": {"errors"},
    "axes": WORDS,
    "mistakes": set(),
    "sections": WORDS | {"axes"},
    "recipe": WORDS | {"sections", "mistakes"},
    "lines": WORDS | {"mistakes"},
    "store": WORDS | {"lines"},
    "timing": set(),
    "values": WORDS,
    "entries": WORDS | {"timing"},
    "columns": WORDS | {"entries", "values"},
    "notes": WORDS | {"columns", "entries", "values"},
    "tables": WORDS | {"columns", "entries", "notes", "values"},
    "cells": {"columns", "tables", "values"},
    "render": WORDS | {"cells", "tables"},
    "screen": {"cells", "tables"},
    "exports": WORDS,
    "limits": WORDS | {"columns", "entries", "values"},
    "compare": WORDS | {"columns", "entries", "limits", "tables", "values"},
    "training": WORDS,
    "fake": WORDS | {"training"},
    "hostmemory": set(),
    "gradients": SETUP,
    "ops": WORDS | {"hostmemory", "kernels"},
    "codecs": WORDS | {"ops"},
    "nn": SETUP | {"ops", "codecs"},
    "schemes": SETUP | {"ops", "codecs", "nn"},
    "workloads": SETUP,
    "meters": SETUP,
    "search": WORDS,
    "recorder": {"hostmemory"},
    "inspection": SETUP | {"recorder"},
    "staging": WORDS,
    "savedmodel": WORDS,
    "conversion": SETUP | {"schemes", "inspection"},
    "folders": SETUP | {"schemes", "workloads", "conversion", "savedmodel", "staging", "machine"},
    "workload_conversion": SETUP | {"schemes", "workloads", "conversion", "folders", "inspection", "staging"},
    "bench": SETUP | {"schemes", "workloads", "meters", "inspection", "gradients", "search"},
    "machine": WORDS,
    "progress": WORDS,
    "live": WORDS | {"progress"},
    "worker": WORDS | {"bench", "processes"},
    "processes": WORDS,
    "runner": REPORTING | {"bench", "search", "machine", "progress", "worker", "processes"},
}
ONE_FILE_ONLY = {
    "typer": "cli/app.py",
    "transformers": "workloads/huggingface.py",
    "torchvision": "workloads/torchvision.py",
    "cupy": "ops/rawkernel.py",
}
TORCH_FREE = REPORTING | {"progress", "live", "machine", "search"}


def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_layers_below_its_own(path: Path) -> None:
    layer = layer_of(path)
    if layer in {"__init__", "__main__", "cli"}:
        return
    assert layer in ALLOWED, f"{layer} has no row in the table of layers"
    names = {name.split(".")[1] for name in imports_of(path) if name.startswith("actbench.")}
    layers = {layer_of(child) for child in files()}

    assert (names & layers) - ALLOWED[layer] - {layer} == set()


@pytest.mark.parametrize(("package", "home"), ONE_FILE_ONLY.items())
def test_a_package_is_imported_in_one_file(package: str, home: str) -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in files()
        if any(name.split(".")[0] == package for name in imports_of(path))
    }

    assert users <= {home}


def test_the_reporting_half_runs_without_torch() -> None:
    modules = sorted(name for name in TORCH_FREE if (SOURCE / f"{name}.py").exists())
    lines = "".join(f"import actbench.{name}\n" for name in modules)
    code = f"import sys\n{lines}assert 'torch' not in sys.modules, 'torch was imported'"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
