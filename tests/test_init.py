from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import actbench


@pytest.mark.parametrize("name", actbench.__all__)
def test_every_public_name_is_importable(name: str):
    assert getattr(actbench, name) is not None


def test_what_is_importable_is_public():
    assert set(actbench._HOMES) | {"__version__"} == set(actbench.__all__)
    assert set(actbench.__all__) <= set(dir(actbench))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = actbench.nonsense


def test_importing_actbench_imports_neither_torch_nor_pydantic():
    code = "import sys, actbench; actbench.__version__; print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_importing_workloads_imports_neither_library():
    code = "import sys, actbench.workload; print({'torchvision', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["set()"]


def test_convert_and_measure_are_functions_after_any_import():
    importlib.import_module("actbench.tools.convert.folders")
    assert callable(actbench.convert)
    assert callable(actbench.measure)
