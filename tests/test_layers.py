"""Who may import whom. Two circles: the core, and plug-ins around it. The tables are the documentation of both."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "actbench"

BASE = {"display", "errors", "tempfiles", "slowsteps", "machine", "paths", "units", "validation"}
# Each room of the core may import those that stand in its set, and itself.
CORE = {
    # no torch
    "display": set(),
    "errors": set(),
    "interrupts": set(),
    "units": {"errors"},
    "caches": {"errors"},
    "keywords": {"errors"},
    "tempfiles": set(),
    "slowsteps": {"units"},
    "paths": {"errors", "units", "tempfiles"},
    "validation": set(),
    "plugins": {"errors"},
    "machine": {"model"},
    "livememory": {"model"},
    "model": BASE - {"machine"} | {"plugins"},
    "report": BASE | {"model", "plugins"},
    "run": BASE | {"livememory", "model", "report", "plugins", "scheme", "workload", "simulator", "measuring"},
    # torch
    "ops": {"errors", "caches"},
    "device": {"errors", "units"},
    "packing": {"errors", "units", "model", "ops"},
    "scheme": {"errors", "units", "plugins", "model", "packing"},
    "workload": BASE | {"plugins", "model", "packing", "scheme", "simulator"},
    # these two know each other's files: the simulated meter is one of the meters
    "simulator": BASE | {"caches", "livememory", "device", "plugins", "model", "ops", "packing", "scheme", "measuring"},
    "measuring": BASE | {"keywords", "device", "plugins", "model", "ops", "packing", "scheme", "workload", "simulator"},
}
FACADES = {"__init__", "optim"}  # public names, which they find in plug-ins at their first use
TOPMOST = {"__main__", "cli", "testing"}
"""These may import all of the core."""

# A plug-in may import the core, and at most this one other plug-in.
NEEDS = {
    "methods.actnn": "methods.fewbit",
    "methods.division": "methods.actnn",
    "methods.dropit": "methods.actnn",
    "methods.formats": "methods.actnn",
    "methods.gact": "methods.actnn",
    "methods.hyclora": "methods.actnn",
    "methods.liger": "methods.msln",
    "methods.lora": "methods.formats",
    "methods.lowbit": "methods.formats",
    "methods.mesa": "methods.actnn",
    "methods.optimizers": "methods.formats",
    "methods.parallel": "methods.formats",
    "methods.prac": "methods.actnn",
    "methods.randomized": "methods.actnn",
    "methods.tiled": "methods.checkpointing",
    "methods.velora": "methods.actnn",
    "methods.weightcopies": "methods.precision",
    "tools.fit": "tools.convert",
    "tools.html": "tools.train",
    "tools.notebook": "tools.script",
    "tools.pytest": "tools.script",
    "tools.script": "tools.fit",
    "tools.train": "methods.parallel",
    "tools.trainers": "tools.convert",
}
FEW_FILES_ONLY = {
    "typer": {"cli/app.py"},
    "transformers": {
        "methods/lora/adaptercaches.py",
        "workload/architectures.py",
        "workload/generation.py",
        "workload/huggingface.py",
        "simulator/overrides.py",
        "tools/script/libraries/vllm.py",
        "tools/trainers/huggingface.py",
    },
    "torchvision": {"workload/torchvision.py"},
    "lightning": {"tools/trainers/lightning.py"},
    "pytorch_lightning": {"tools/trainers/lightning.py"},
    "cupy": {"ops/rawkernel.py"},
    "peft": {"methods/lora/lowrank.py"},
}
TORCH_FREE = set(list(CORE)[: list(CORE).index("ops")]) | {"tools.html"}
TORCH_FREE_FILES = {"records.py", "tables.py", "recipe.py", "report.py", "suggestions.py", "verdict.py"}
"""Of tools: what the command line and reports import."""
SCRIPT_ROOMS = ("steps", "answers", "card", "processes", "libraries", "values")
RUN = {SOURCE / "run" / "sweep.py"}  # it imports what it runs


@functools.cache
def imports_of(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Return the dotted names that a file imports anywhere in it; ``at_run_time`` without those for type checkers."""
    tree = ast.parse(path.read_text())
    skipped = set[ast.AST]()
    if at_run_time:
        guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        skipped = {inside for guard in guards for inside in ast.walk(guard)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


FILES = sorted(SOURCE.rglob("*.py"))


def room_of(module: str) -> str:
    """Return the room of a dotted name without ``actbench.``; that of a plug-in has two parts."""
    first, *others = module.split(".")
    return f"{first}.{others[0]}" if first in ("methods", "tools") and others else first


def home_of(path: Path) -> str:
    return room_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))


ROOMS = {home_of(path) for path in FILES}


def is_plugin(room: str) -> bool:
    return room.partition(".")[0] in ("methods", "tools")


def rooms_imported_by(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Return the rooms that a file imports, without its own."""
    names = {
        name.removeprefix("actbench.") for name in imports_of(path, at_run_time=at_run_time) if "actbench." in name
    }
    return {room_of(name) for name in names} & ROOMS - {home_of(path)}


def shown(found: dict[Path, set[str]]) -> dict[str, set[str]]:
    return {str(path.relative_to(SOURCE)): names for path, names in found.items() if names}


def test_the_core_imports_no_plug_in() -> None:
    found = {
        path: {room for room in rooms_imported_by(path, at_run_time=home_of(path) in FACADES) if is_plugin(room)}
        for path in FILES
        if not is_plugin(home_of(path))
    }

    assert shown(found) == {}


def test_a_plug_in_imports_the_core_and_the_plug_in_that_it_declares() -> None:
    found = {
        path: {room for room in rooms_imported_by(path) if is_plugin(room) and room != NEEDS.get(home_of(path))}
        for path in FILES
        if is_plugin(home_of(path))
    }

    assert shown(found) == {}
    assert {name for name in NEEDS if NEEDS[name] not in set().union(*map(rooms_imported_by, files_of(name)))} == set()


def files_of(room: str) -> list[Path]:
    return [path for path in FILES if home_of(path) == room]


def test_a_file_of_the_core_imports_only_rooms_below_its_own() -> None:
    others = {path: rooms_imported_by(path) for path in FILES if home_of(path) in CORE}

    assert shown({path: rooms - CORE[home_of(path)] for path, rooms in others.items()}) == {}
    assert {room for room in ROOMS if not is_plugin(room)} - {"kernels", "recipes"} == {*CORE, *FACADES, *TOPMOST}


def test_a_room_of_scripts_imports_only_those_below_it() -> None:
    below = {room: SCRIPT_ROOMS[:place] for place, room in enumerate(SCRIPT_ROOMS)}
    home = "actbench.tools.script."
    imported = {
        path: {name.removeprefix(home).partition(".")[0] for name in imports_of(path) if name.startswith(home)}
        for path in FILES
        if path.parent.parent == SOURCE / "tools" / "script"
    }

    assert {path.parent.name for path in imported} == set(SCRIPT_ROOMS)
    assert shown({path: rooms - {path.parent.name, *below[path.parent.name]} for path, rooms in imported.items()}) == {}


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


@pytest.mark.parametrize(("package", "homes"), FEW_FILES_ONLY.items())
def test_a_package_is_imported_where_it_belongs(package: str, homes: set[str]) -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in FILES
        if any(name.split(".")[0] == package for name in imports_of(path))
    }

    assert users <= homes


def test_help_of_a_verb_imports_no_other_verb() -> None:
    code = (
        "import sys\nsys.argv = ['actbench', 'report', '--help']\nfrom actbench.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "found = [name for name in sys.modules if name.startswith('actbench.') and name.endswith('.command')]\n"
        "assert not [*found, *({'actbench.cli.sweep', 'actbench.cli.doctor'} & set(sys.modules))], found"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def is_record_or_table(path: Path) -> bool:
    return home_of(path).startswith("tools.") and path.name in TORCH_FREE_FILES


def test_the_reporting_half_runs_without_torch() -> None:
    names = sorted(
        module_of(path).removesuffix(".__init__")
        for path in FILES
        if path not in RUN and (home_of(path) in TORCH_FREE or path.name == "command.py" or is_record_or_table(path))
    )
    lines = "".join(f"import {name}\n" for name in names)
    heavy = "{'torch', 'pandas', 'numpy', 'transformers'}"
    code = f"import sys\n{lines}found = {heavy} & set(sys.modules)\nassert not found, found"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert len(names) > 80
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("arguments", [["--help"], ["sweep", "--help"], ["report", "nothing.jsonl"]])
def test_help_and_report_answer_without_torch(arguments: list[str]) -> None:
    code = (
        f"import sys\nsys.argv = ['actbench', *{arguments!r}]\nfrom actbench.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'transformers'} & set(sys.modules)\nassert not heavy, heavy"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
