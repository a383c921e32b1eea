"""Who may import whom: the table below is the documentation of the layers."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "actbench"

# Each room may import those that stand in its set, and itself.
WORDS = {"errors", "units", "caches", "leftovers", "paths", "spec", "validation"}
SETUP = WORDS | {"results", "setup", "microbatches"}
_BELOW = {"declared", "longsteps", "optimstate", "ops", "codecs", "nn", "schemes"}
ALLOWED = {
    # reporting: no torch
    "errors": set(),
    "units": {"errors"},
    "caches": {"errors"},
    "leftovers": set(),
    "axes": set(),
    "plugins": {"errors"},
    "longsteps": {"units"},
    "paths": {"errors", "units", "leftovers"},
    "spec": {"errors", "units"},
    "validation": set(),
    "declared": {"errors", "paths", "plugins", "spec", "results", "units"},
    "results": WORDS | {"plugins"},
    "experiments": WORDS | {"longsteps", "results", "measuring", "schemes", "workloads"},
    # measuring
    "microbatches": {"errors"},
    "ops": {"errors", "kernels", "caches"},
    "codecs": WORDS | {"results", "ops"},
    "optim": set(),
    "optimstate": WORDS | {"ops", "codecs"},
    "conditions": {"microbatches"},
    "setup": {"conditions", "errors", "results", "microbatches", "optimstate"},
    "nn": SETUP | {"axes"} | {"ops", "codecs", "optimstate"},
    "schemes": SETUP | {"axes", "plugins", "ops", "codecs", "nn", "optimstate"},
    "workloads": SETUP | {"declared", "plugins", "longsteps", "ops", "nn"},
    "measuring": SETUP | _BELOW | {"axes", "workloads"},
    "script": SETUP | _BELOW | {"workloads", "measuring"},
    "conversion": SETUP | {"ops", "nn", "schemes", "workloads", "measuring"},
    "fitting": SETUP | {"schemes", "workloads", "measuring", "experiments"},
    "training": SETUP | {"nn", "schemes", "workloads", "measuring", "experiments"},
}
FEW_FILES_ONLY = {
    "typer": {"cli/app.py"},
    "transformers": {
        "nn/adaptercaches.py",
        "workloads/architectures.py",
        "workloads/huggingface.py",
        "workloads/overrides.py",
        "conversion/trainers/huggingface.py",
    },
    "torchvision": {"workloads/torchvision.py"},
    "lightning": {"conversion/trainers/lightning.py"},
    "pytorch_lightning": {"conversion/trainers/lightning.py"},
    "cupy": {"ops/rawkernel.py"},
    "peft": {"nn/lowrank.py"},
}
KNOWN_BY_ENTRY_POINT = {
    "actbench.results.render.page": {"results/htmlexport.py", "cli/timeline.py"},
    "actbench.results.tables.fits": {"cli/fit.py", "fitting/fit.py"},
    "actbench.results.tables.training": {
        *("cli/train.py", "training/comparison.py", "training/oncluster.py"),
        *("results/render/page/training.py", "results/render/charts.py"),
    },
    **{f"actbench.cli.{verb}": set() for verb in ("convert", "encodings", "fit", "kernels", "run", "train")},
}
"""Modules of plug-ins: the core reaches them by entry points alone, and only these files may import them."""
ANY = {"__init__", "__main__", "cli"}  # these may import every layer
TORCH_FREE = list(ALLOWED)[: list(ALLOWED).index("microbatches")]
RUN = {SOURCE / "experiments" / name for name in ("sweep.py", "scripts.py")}  # and import what they run


@functools.cache
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


FILES = sorted(SOURCE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


LAYERS = {layer_of(path) for path in FILES}


def not_allowed(path: Path) -> set[str]:
    """Return the layers that a file imports and may not."""
    names = {name.split(".")[1] for name in imports_of(path) if name.startswith("actbench.")}
    return (names & LAYERS) - ALLOWED[layer_of(path)] - {layer_of(path)}


PROCESSES = {"experiments/ranks", "experiments/cluster", "measuring/ranks.py", "measuring/launch.py"}


def test_only_plug_ins_import_what_spreads_cases_over_processes() -> None:
    """The loop and the meters take executors and processes as values."""
    names = {f"actbench.{part.removesuffix('.py').replace('/', '.')}" for part in PROCESSES}
    users = {
        str(path.relative_to(SOURCE))
        for path in FILES
        if any(name == part or name.startswith(f"{part}.") for name in imports_of(path) for part in names)
    }

    assert {user for user in users if not any(user.startswith(part) for part in (*PROCESSES, "training/"))} == set()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)


def test_no_files_import_each_other_in_a_circle() -> None:
    """A package that only gathers names of its files is no part of one."""
    modules = {module_of(path): path for path in FILES if path.name != "__init__.py"}
    graph = {module: (imports_of(path) & modules.keys()) - {module} for module, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' imports '.join(reversed(error.args[1]))}")


def test_no_file_is_longer_than_a_reader_likes() -> None:
    lengths = {module_of(path): len(path.read_text().splitlines()) for path in FILES}

    assert {module: lines for module, lines in lengths.items() if lines > 300} == {}


def test_every_layer_has_a_row_in_the_table() -> None:
    assert ALLOWED.keys() >= LAYERS - ANY


def test_a_file_imports_only_layers_below_its_own() -> None:
    found = {str(path.relative_to(SOURCE)): not_allowed(path) for path in FILES if layer_of(path) not in ANY}

    assert {path: layers for path, layers in found.items() if layers} == {}


@pytest.mark.parametrize(("package", "homes"), FEW_FILES_ONLY.items())
def test_a_package_is_imported_where_it_belongs(package: str, homes: set[str]) -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in FILES
        if any(name.split(".")[0] == package for name in imports_of(path))
    }

    assert users <= homes


@pytest.mark.parametrize(("module", "homes"), KNOWN_BY_ENTRY_POINT.items())
def test_a_plug_in_is_known_by_its_entry_point(module: str, homes: set[str]) -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in FILES
        if any(f"{name}.".startswith(f"{module}.") for name in imports_of(path)) and module not in module_of(path)
    }

    assert users <= homes


def test_help_of_a_verb_imports_no_other_verb() -> None:
    code = (
        "import sys\nsys.argv = ['actbench', 'report', '--help']\nfrom actbench.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "found = {f'actbench.cli.{name}' for name in ('train', 'fit', 'run', 'convert', 'sweep', 'doctor')}\n"
        "assert not found & set(sys.modules), found & set(sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_the_reporting_half_runs_without_torch() -> None:
    names = sorted(
        str(path.relative_to(SOURCE.parent)).removesuffix(".py").replace("/", ".")
        for path in FILES
        if layer_of(path) in TORCH_FREE and path not in RUN
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
