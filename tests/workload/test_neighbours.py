"""What stands beside a user's own file: that file's code imports it, behind installed packages, and no other code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actbench.methods.fewbit.useractivation import OwnFunction
from actbench.model.records import Case
from actbench.workload import load_workload

MODEL = """
import torch
from torch import nn
import beside_a
import networkx_of_nobody_else

def build():
    import beside_lazily
    return nn.Linear(8, beside_a.WIDTH), lambda n: {"x": torch.randn(n, 8)}, beside_lazily.loss
"""
ACTIVATION = "import torch\nimport beside_a\n\ndef f(x):\n    return torch.nn.functional.silu(x)\n"
NAMES = ("beside_a", "beside_lazily", "beside_package", "networkx_of_nobody_else")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    finders, path = list(sys.meta_path), list(sys.path)
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "act.py").write_text(ACTIVATION)
    (tmp_path / "beside_a.py").write_text("from beside_package.inner import WIDTH\n")
    (tmp_path / "beside_lazily.py").write_text("def loss(m, b):\n    return m(b['x']).sum()\n")
    (tmp_path / "beside_package").mkdir()
    (tmp_path / "beside_package" / "inner.py").write_text("import networkx_of_nobody_else\nWIDTH = 3\n")
    (tmp_path / "networkx_of_nobody_else.py").touch()
    (tmp_path / "ran.py").write_text("raise AssertionError('it ran')")
    (tmp_path / "filelock.py").write_text("raise AssertionError('it ran')")
    monkeypatch.delitem(sys.modules, "filelock", raising=False)
    yield tmp_path
    assert sys.path == path
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def of_model(folder: Path) -> object:
    workload = load_workload(Case(model=f"{folder / 'own.py'}:build", batch_size=1))
    return workload.setup(materialize=True, seed=0)


def of_activation(folder: Path) -> object:
    return OwnFunction.load(f"{folder / 'act.py'}:f")


@pytest.mark.parametrize("load", [of_model, of_activation])
def test_a_users_file_imports_its_neighbours_and_nobody_else_does(folder: Path, load: Callable[[Path], object]) -> None:
    load(folder)

    assert sys.modules["beside_a"].WIDTH == 3
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ran")
    assert "site-packages" in str(importlib.import_module("filelock").__file__)


def test_an_installed_package_is_before_a_neighbour_for_the_file_itself(folder: Path) -> None:
    (folder / "act.py").write_text("import filelock\n" + ACTIVATION)

    of_activation(folder)
    assert "site-packages" in str(sys.modules["filelock"].__file__)


def test_one_folder_is_looked_through_once(folder: Path) -> None:
    before = len(sys.meta_path)
    of_activation(folder)
    of_activation(folder)

    assert len(sys.meta_path) == before + 1
