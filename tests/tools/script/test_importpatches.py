from __future__ import annotations

import importlib
import inspect
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from actbench.tools.script.libraries import importpatches
from actbench.tools.script.libraries.importpatches import changed, patch_on_import, rebind, searched_once
from actbench.tools.script.libraries.libraries import prepared


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
    with patch_on_import({package: change}, {}, print):
        module = importlib.import_module(package)

        class Mine(module.Model):  # type: ignore[misc, name-defined]
            pass

        assert Mine.load("x") == ("Mine", "x")
        assert "def load" in inspect.getsource(module)
    assert Mine.load("x") == "x"


def test_a_library_that_is_not_imported_stays_out(package: str) -> None:
    with patch_on_import({package: change}, {}, print):
        assert package not in sys.modules


@pytest.mark.slow
def test_no_library_is_imported_by_preparing() -> None:
    import subprocess

    code = (
        "import sys\nfrom actbench.tools.script.libraries.libraries import prepared\n"
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


def test_libraries_search_the_modules_once_to_change_and_once_to_restore_them(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[importpatches._Copies] = []

    class Counted(importpatches._Copies):
        def __init__(self) -> None:
            searches.append(self)
            super().__init__()

    monkeypatch.setattr(importpatches, "_Copies", Counted)
    with prepared(print):
        assert len(searches) == 1
    assert len(searches) == 2


def test_a_function_and_all_its_copies_are_its_own_again(package: str) -> None:
    module, early, late = importlib.import_module(package), ModuleType("early"), ModuleType("late")
    module.load = own = module.Model.load.__func__  # type: ignore[attr-defined]
    early.taken = own  # type: ignore[attr-defined]
    sys.modules.update(early=early, late=late)
    notes = dict(vars(own))
    try:
        with rebind(module, "load", lambda found: lambda *args: "outer"):
            with rebind(module, "load", lambda found: lambda *args: f"inner of {found()}"):
                late.taken = kept = module.load  # type: ignore[attr-defined]
                assert kept() == early.taken() == "inner of outer"
            assert early.taken() == late.taken() == module.load() == "outer"
    finally:
        del sys.modules["early"], sys.modules["late"]
    assert (module.load, early.taken, late.taken) == (own, own, own)
    assert vars(own) == notes
    assert kept(module.Model, "x") == "x"


def test_one_search_finds_the_copies_of_all_functions_also_those_that_modules_gain_after_it(package: str) -> None:
    module, early, late = importlib.import_module(package), ModuleType("early"), ModuleType("late")
    owns = [lambda: "a", lambda: "b", module.Model.load]
    module.a, module.b, module.load = early.a, early.b, early.load = owns  # type: ignore[attr-defined]
    sys.modules.update(early=early)
    try:
        with ExitStack() as stack:
            with searched_once():
                stack.enter_context(rebind(module, "a", lambda own: lambda: "new " + own()))
                sys.modules.update(late=late)
                late.b, early.b_too = module.b, module.b  # type: ignore[attr-defined]
                late.load = module.Model.load  # type: ignore[attr-defined]
                stack.enter_context(rebind(module, "b", lambda own: lambda: "new " + own()))
                stack.enter_context(rebind(module, "load", lambda own: lambda name: "new " + own(name)))
                stack.enter_context(rebind(module, "a", lambda own: lambda: "twice " + own()))
            assert module.a() == early.a() == "twice new a"
            assert module.b() == early.b() == early.b_too() == late.b() == "new b"
            assert module.load("c") == early.load("c") == late.load("c") == "new c"
            late.a = module.a  # type: ignore[attr-defined]
            leaving = stack.pop_all()
        with searched_once():
            leaving.close()
    finally:
        for name in ("early", "late"):
            sys.modules.pop(name, None)
    assert [module.a, module.b, module.load] == [early.a, early.b, early.load] == owns
    assert [late.a, early.b_too, late.b, late.load] == [owns[0], owns[1], owns[1], owns[2]]
