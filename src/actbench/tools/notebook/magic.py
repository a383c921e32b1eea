"""``%%actbench rtx-4090``: the training loop of a cell on a simulated card."""

from __future__ import annotations

import argparse
import ast
import shlex
from pathlib import Path
from typing import Any, Final, NoReturn

from actbench import scheme as schemes
from actbench.errors import UsageError
from actbench.model.declared import device_named
from actbench.run.cellprogress import shown_in_cell
from actbench.tools.script.simulate import simulate
from actbench.tools.script.simulation import Simulation
from actbench.units import format_bytes, parse_bytes

NAME: Final = "actbench"


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%{NAME}: {message}; for example: %%{NAME} rtx-4090 -s checkpoint --batch-size 16")


def _parser() -> argparse.ArgumentParser:
    parser = _Options(prog=f"%%{NAME}", add_help=False, allow_abbrev=False)
    parser.add_argument("device_profile")
    parser.add_argument("-s", "--scheme")
    parser.add_argument("-b", "--batch-size", type=int)
    parser.add_argument("--memory-limit")
    parser.add_argument("--steps", type=int)
    return parser


def load(shell: Any) -> None:
    """Register the magic with an IPython shell."""

    def actbench(line: str, cell: str) -> Simulation:
        """Run the training loop of the cell on a simulated card, and show what a step needs; ``card`` keeps it.

        %%actbench DEVICE [-s SCHEME] [-b ROWS] [--memory-limit SIZE] [--steps N]
        """
        return run(shell, line, cell)

    shell.register_magic_function(actbench, magic_kind="cell", magic_name=NAME)


def run(shell: Any, line: str, cell: str) -> Simulation:
    """Run a cell in the namespace of a shell until two steps are equal, and return the simulation, ``card`` there.

    Raises:
        UsageError: The line has other options, or values that cannot be used.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%%{NAME}: {line}: {error}") from None
    asked = _parser().parse_args(words)
    limit = None if asked.memory_limit is None else parse_bytes(asked.memory_limit)
    source = shell.transform_cell(cell)
    file = shell.compile.cache(source)  # so that lines of the cell have a name and a text
    code = compile(ast.parse(source, file), file, "exec")
    with shown_in_cell() as progress:
        card = simulate(
            device_named(asked.device_profile),
            scheme=None if asked.scheme is None else schemes.build(asked.scheme),
            memory_limit_bytes=limit,
            batch_size=asked.batch_size,
            steps=asked.steps,
            script=Path(file),
            warns=False,
            stepped=lambda number, step: progress.doing(f"step {number}: peak {format_bytes(step.peak_bytes)}"),
        )
        shell.user_ns["card"] = card
        progress.doing("first step")
        with card:
            exec(code, shell.user_ns)
    return card
