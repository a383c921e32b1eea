"""What a case and a conversion import: the schemes that they name, and what those use."""

from __future__ import annotations

import subprocess
import sys

import pytest

LISTED = "import sys\nprint(*sorted(name for name in sys.modules if name.startswith('actbench.')))"
EXACT = "import actbench\nactbench.measure(actbench.Case(model='tiny-bert', batch_size=2, meter='simulated'))\n"
CONVERTED = """
import torch
import actbench
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
actbench.convert(model, 'fewbit:3')
"""


def imported(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code + LISTED], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_an_exact_case_imports_no_scheme() -> None:
    assert [name for name in imported(EXACT) if name.startswith("actbench.methods.")] == []


@pytest.mark.slow
def test_a_conversion_imports_neither_the_simulator_nor_another_scheme() -> None:
    found = imported(CONVERTED)

    assert not [name for name in found if name.startswith(("actbench.simulator", "actbench.measuring", "actbench.run"))]
    methods = {name.split(".")[2] for name in found if name.startswith("actbench.methods.")}
    assert methods == {"fewbit"}


def test_what_runs_an_operator_once_is_imported_first() -> None:
    """It looks for operators that other modules define."""
    assert "actbench.ops.hostmemory" in imported("import actbench.simulator.cachingmode\n")
