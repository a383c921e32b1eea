"""Who may import whom: the table below is the documentation of the layers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "actbench"

# Each layer may import those that stand in its set, and itself.
WORDS = {"counts", "errors", "units", "paths", "reading", "records", "spec", "defaults"}
SETUP = WORDS | {"foreign", "training", "fake", "hostmemory", "savedtensors"}
ALLOWED = {
    # reporting: no torch
    "counts": set(),
    "errors": set(),
    "units": {"counts", "errors"},
    "paths": {"errors"},
    "reading": {"units"},
    "plain": set(),
    "defaults": set(),
    "records": {"counts", "defaults"},
    "spec": {"counts", "errors"},
    "mistakes": set(),
    "ledger": {"counts", "records"},
    "converted": {"records"},
    "recipe": WORDS | {"mistakes"},
    "store": WORDS | {"mistakes"},
    "tables": WORDS | {"ledger"},
    "render": WORDS | {"tables", "plain"},
    "compare": WORDS | {"tables"},
    "runs": WORDS | {"mistakes", "recipe", "store", "tables"},
    "machine": WORDS,
    "search": WORDS,
    "runner": WORDS | {"machine", "search", "plain"},
    # measuring
    "training": WORDS,
    "foreign": {"errors"},
    "fake": WORDS | {"training"},
    "hostmemory": set(),
    "savedtensors": set(),
    "gradients": SETUP,
    "ops": WORDS | {"hostmemory", "kernels"},
    "codecs": WORDS | {"foreign", "ops", "mistakes"},
    "optim": WORDS | {"ops", "codecs"},
    "nn": SETUP | {"ops", "codecs"},
    "schemes": SETUP | {"ops", "codecs", "nn", "optim"},
    "workloads": SETUP | {"nn"},
    "meters": SETUP | {"machine"},
    "inspection": SETUP | {"ledger"},
    "bench": SETUP | {"ledger", "nn", "schemes", "workloads", "meters", "inspection", "gradients", "search"},
    "conversion": SETUP | {"nn", "schemes", "workloads", "meters", "inspection", "mistakes", "machine", "converted"},
    "integrations": SETUP | {"nn", "schemes", "meters", "inspection", "conversion"},
    # both
    "learning": SETUP | {"nn", "schemes", "workloads", "meters", "inspection", "bench", "machine", "runs", "render"},
    "kernelbench": WORDS | {"tables", "machine", "ops", "codecs", "nn"},
    "experiment": WORDS
    | {"recipe", "store", "tables", "render", "machine", "runner", "schemes", "workloads", "meters"},
    "doctor": WORDS | {"machine"},
}
FEW_FILES_ONLY = {
    "typer": {"cli/app.py"},
    "transformers": {
        "workloads/architectures.py",
        "workloads/huggingface.py",
        "workloads/sequences.py",
        "integrations/huggingface.py",
    },
    "torchvision": {"workloads/torchvision.py"},
    "lightning": {"integrations/lightning.py"},
    "pytorch_lightning": {"integrations/lightning.py"},
    "cupy": {"ops/rawkernel.py"},
}
TORCH_FREE = list(ALLOWED)[: list(ALLOWED).index("training")]


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


@pytest.mark.parametrize(("package", "homes"), FEW_FILES_ONLY.items())
def test_a_package_is_imported_where_it_belongs(package: str, homes: set[str]) -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in files()
        if any(name.split(".")[0] == package for name in imports_of(path))
    }

    assert users <= homes


def test_the_reporting_half_runs_without_torch() -> None:
    names = sorted(
        str(path.relative_to(SOURCE.parent)).removesuffix(".py").replace("/", ".")
        for path in files()
        if layer_of(path) in TORCH_FREE
    )
    lines = "".join(f"import {name}\n" for name in names)
    heavy = "{'torch', 'pandas', 'numpy', 'transformers'}"
    code = f"import sys\n{lines}found = {heavy} & set(sys.modules)\nassert not found, found"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["sweep", "--help"], ["report", "nothing.jsonl"]])
def test_help_and_report_answer_without_torch(arguments: list[str]) -> None:
    code = (
        f"import sys\nsys.argv = ['actbench', *{arguments!r}]\nfrom actbench.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'transformers'} & set(sys.modules)\nassert not heavy, heavy"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
