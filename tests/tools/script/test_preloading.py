"""Libraries at the head of a script are imported once, and as in the script: for all runs of it, and on the card."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainings import TRAINING

from actbench.tools.script import preloading

LIBRARY = """
import torch
print("imported for the card")
is_on_card = torch.cuda.is_available()
"""


@pytest.mark.slow
def test_a_library_is_imported_once_for_all_trials_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "pytorch_lightning.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(f"from pytorch_lightning import is_on_card\nassert is_on_card\n{TRAINING}")
    command = ("-m", "actbench", "run", "--device-profile", "rtx-4090", "--memory-limit", "64MiB", "--max-batch")
    paths = os.pathsep.join((str(tmp_path / "installed"), os.environ.get("PYTHONPATH", "")))

    ran = subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )

    told = f"{ran.stdout}{ran.stderr}"
    assert "The largest batch that fits is" in told
    assert told.count("fit (after") + told.count("fits (after") > 1
    assert told.count("imported for the card") == 1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"""Trains."""\nimport math, timm\nimport timm.models\nfrom peft import LoraConfig', 2),
        ("import timm\nimport os\nos.environ['HF_HOME'] = 'here'\nimport transformers", 1),
        ("import timm\nimport trl\nimport transformers", 1),
        ("from . import peft", 0),
        ("def main():\n    import transformers", 0),
    ],
)
def test_imports_end_where_a_script_does_something_else_or_has_a_module_of_that_name(
    tmp_path: Path, text: str, names: int
) -> None:
    (tmp_path / "trl.py").touch()

    assert len(list(preloading._first_imports(ast.parse(text), tmp_path))) == names
