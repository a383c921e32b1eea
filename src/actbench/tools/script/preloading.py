"""Libraries that a script imports first of all: imported once, for all processes in which the script runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from actbench.model.scripts import Script
from actbench.simulator.card import simulated
from actbench.simulator.profiles import DeviceProfile

_LIBRARIES = (
    "accelerate",
    "datasets",
    "diffusers",
    "lightning",
    "peft",
    "pytorch_lightning",
    "timm",
    "torchvision",
    "transformers",
    "trl",
)
"""Libraries that take seconds to import, and whose import begins no thread: a process is forked after it."""


def preload(script: Script, profile: DeviceProfile) -> None:
    """Import the libraries of :data:`_LIBRARIES` that a script imports before anything else.

    Processes that are forked afterwards find them: a search runs a script four to six times. What an import decides by
    the card is decided by a simulated one. An import that fails, fails again in the script.
    """
    if not profile.is_cuda or script.file is None:
        return
    try:
        tree = ast.parse(Path(script.file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # told when the script runs
        return
    folder = Path.cwd() if script.is_module else Path(script.file).resolve().parent
    with simulated(profile):
        for statement in _first_imports(tree, folder):
            with suppress(Exception, SystemExit):
                exec(compile(ast.Module([statement], []), script.file, "exec"), {"__name__": "__main__"})


def _first_imports(tree: ast.Module, folder: Path) -> Iterator[ast.stmt]:
    """Yield the imports of libraries at the head of a script.

    They end at the first statement that is no import, which may set what a library reads when it is imported, such as
    an environment variable; and where a file or folder of the user's has a library's name.
    """
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        if isinstance(statement, ast.Import):
            names = [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module is not None:
            names = [statement.module]
        else:
            return
        packages = {name.partition(".")[0] for name in names}
        if any((folder / f"{name}.py").exists() or (folder / name).is_dir() for name in packages):
            return
        if packages <= set(_LIBRARIES):
            yield statement
