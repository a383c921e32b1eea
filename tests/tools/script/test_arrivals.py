from __future__ import annotations

import importlib
import inspect
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest

from actbench.tools.script.arrivals import changed, on_arrival, rebound
from actbench.tools.script.libraries import prepared


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_up_library.py").write_text(
        "class Model:\n    @classmethod\n    def load(cls, name): return name\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up_library", raising=False)
    return "made_up_library"


def change(module: ModuleType) -> AbstractContextManager[object]:
    def loading(own: object) -> object:
        return lambda cls, name: (cls.__name__, name)

    return changed(module.Model, "load", loading)


@pytest.mark.parametrize("before", [True, False])
def test_a_library_is_changed_whenever_it_is_imported(package: str, before: bool) -> None:
    if before:
        importlib.import_module(package)
    with on_arrival({package: change}, {}, print):
        module = importlib.import_module(package)

        class Mine(module.Model):  # type: ignore[misc, name-defined]
            pass

        assert Mine.load("x") == ("Mine", "x")
        assert "def load" in inspect.getsource(module)
    assert Mine.load("x") == "x"


def test_a_library_that_is_not_imported_stays_out(package: str) -> None:
    with on_arrival({package: change}, {}, print):
        assert package not in sys.modules


@pytest.mark.slow
def test_no_library_is_imported_by_preparing() -> None:
    import subprocess

    code = (
        "import sys\nfrom actbench.tools.script.libraries import prepared\n"
        "before = set(sys.modules)\nwith prepared(print): pass\n"
        "heavy = {'transformers', 'peft', 'accelerate', 'diffusers', 'bitsandbytes', 'lightning', 'timm', 'trl'}\n"
        "assert not heavy & (set(sys.modules) - before), heavy & (set(sys.modules) - before)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_a_sentence_is_noted_once() -> None:
    import torch

    notes: list[str] = []
    with prepared(notes.append):
        torch.compile(torch.nn.Linear(1, 1))
        torch.compile(torch.nn.Linear(1, 1))

    assert len(notes) == 1


def test_a_function_and_all_its_copies_are_its_own_again(package: str) -> None:
    module, early, late = importlib.import_module(package), ModuleType("early"), ModuleType("late")
    module.load = own = module.Model.load.__func__  # type: ignore[attr-defined]
    early.taken = own  # type: ignore[attr-defined]
    sys.modules.update(early=early, late=late)
    notes = dict(vars(own))
    try:
        with rebound(module, "load", lambda found: lambda *args: "outer"):
            with rebound(module, "load", lambda found: lambda *args: f"inner of {found()}"):
                late.taken = kept = module.load  # type: ignore[attr-defined]
                assert kept() == early.taken() == "inner of outer"
            assert early.taken() == late.taken() == module.load() == "outer"
    finally:
        del sys.modules["early"], sys.modules["late"]
    assert (module.load, early.taken, late.taken) == (own, own, own)
    assert vars(own) == notes
    assert kept(module.Model, "x") == "x"
