"""Ctrl-C at any moment of a command's first second: status 130 and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED_AT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == AT:
            os.kill(os.getpid(), signal.SIGINT)

AT = sys.argv.pop(1)
sys.orig_argv = ["python", "/bin/actbench", *sys.argv[1:]]
sys.meta_path.insert(0, Interrupting())
from actbench.cli import main
main()
"""
EARLY = ("actbench.caches", "platformdirs", "actbench.cli.running", "actbench.cli.defaults", "typer")
LATER = ("actbench.cli.sweep", "actbench.run.recipes", "actbench.run.sweep")


@pytest.mark.parametrize("name", [*EARLY, *LATER])
def test_a_command_that_is_interrupted_while_it_imports_ends_without_a_traceback(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT, name, "measure", "tiny-bert", "--meter", "simulated"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)

    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "interrupted" in ended.stderr or name in LATER  # where typer may say nothing


def test_a_program_that_imports_actbench_gets_its_keyboard_interrupt(tmp_path: Path) -> None:
    code = INTERRUPTED_AT.replace('sys.orig_argv = ["python", "/bin/actbench", *sys.argv[1:]]', "")
    code = code.replace(
        "from actbench.cli import main\nmain()", "try:\n    import actbench\nexcept KeyboardInterrupt: print('mine')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "actbench.caches"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )

    assert ended.stdout == "mine\n", ended.stderr
