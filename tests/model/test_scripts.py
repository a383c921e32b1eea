"""Scripts of the user's own in records: their text, their files, and what makes a case another."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from pydantic import ValidationError

from actbench.model.contents import Contents, content_of
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Built, Case
from actbench.model.scripts import Script, file_of_module
from actbench.report import store
from actbench.report.render import markdown
from actbench.report.sentences import name_of
from actbench.report.tables import results_table

DATA = Path(__file__).parents[1] / "data"
MakeRecord = Callable[..., MeasuredRecord]


def case(**settings: object) -> Case:
    script = Script.model_validate({"target": "train.py", "arguments": ("--lr", "3 e"), **settings})
    return Case(model=script.text, batch_size=script.batch_size or 1, script=script)


def test_the_text_of_a_script_is_what_a_shell_takes_behind_python() -> None:
    assert shlex.split(case().model) == ["train.py", "--lr", "3 e"]
    assert Script(target="trl", is_module=True, arguments=("sft", "--x")).text == "-m trl sft --x"


def test_sentences_call_a_script_by_its_name_where_its_arguments_are_long() -> None:
    many = tuple(f"--option{number} value" for number in range(9))

    assert Script(target="/home/me/train.py", arguments=("--epochs", "3")).shown == "train.py --epochs 3"
    assert Script(target="examples/train.py", arguments=many).shown == "examples/train.py …"
    assert Script(target="trl.scripts.sft", is_module=True, arguments=many).shown == "-m trl.scripts.sft …"
    assert Script(target=f"{'long/' * 20}train.py").shown == f"{'long/' * 20}train.py"
    with pytest.raises(ValidationError):
        Script(target="")


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("measured-2026-11.jsonl", "0da38fbffe733fbb"),
        ("quickstart-2026-11.jsonl", "785aef482c22a5a1"),
        ("results-schema-1.jsonl", "e9ac538edb87fe3e"),
    ],
)
def test_keys_of_cases_without_a_script_are_what_they_were(file: str, first: str) -> None:
    """The keys are those of the version that knew no scripts."""
    record = store.read_results(DATA / file, MeasuredRecord).records[0]

    assert record.case.key() == first


def test_any_field_of_a_script_makes_another_case() -> None:
    changes = ({"arguments": ()}, {"batch_size": 2}, {"steps": 2}, {"processes": 2}, {"raise_oom": True})

    assert case().key() == case().key()
    assert len({case().key(), *(case(**change).key() for change in changes)}) == 1 + len(changes)


def test_a_script_has_its_own_type_optimizer_and_batch(make_record: MakeRecord) -> None:
    own = case()
    assert (own.dtype, own.optimizer, own.rows) == (None, None, None)
    assert own.name == "train.py --lr '3 e', exact (simulated)"
    assert case(batch_size=4).name == "train.py --lr '3 e', exact, batch 4 (simulated)"

    record = make_record(
        model=own.model, batch_size=1, script=own.script, built=Built(model_class="Net", batch_size=32)
    )
    assert name_of(record.case, record.outcome) == "train.py --lr '3 e', exact, batch 32 (simulated)"
    assert MeasuredRecord.model_validate_json(record.model_dump_json()) == record
    assert "| 32 | exact |" in markdown(results_table([record]))

    searched = own.with_batch(7)
    assert (searched.batch_size, searched.rows) == (7, 7)
    assert own.script is not None
    assert own.script.batch_size is None


def test_samples_a_second_need_the_rows_of_a_step(make_record: MakeRecord) -> None:
    def shown(**built: int) -> object:
        found = make_record(
            model="train.py",
            batch_size=1,
            script=Script(target="train.py"),
            built=Built(model_class="Net", **built),
            step_seconds=(0.5,),
        )
        (row,) = results_table([found]).rows
        return row.get("samples_per_second")

    assert shown(batch_size=8, micro_batches=4) == 64
    assert shown(batch_size=8) is None
    assert shown() is None


def test_the_content_of_a_script_is_part_of_its_case(
    make_record: MakeRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("x = 1")
    script = Script(target="train.py", arguments=("--fn", "other.py:build"))
    record = make_record(model=script.text, batch_size=1, script=script)
    files = Contents().of(record.case)
    Path("train.py").write_text("x = 2")

    assert files is not None
    assert list(files) == ["train.py"]
    assert Contents().of(record.case) != files
    assert content_of(record.model_copy(update={"files": files})) == (files["train.py"], None)


def content(script: str, *, is_module: bool = False) -> dict[str, str] | None:
    made = Script(target=script, is_module=is_module)
    return Contents().of(Case(model=made.text, batch_size=1, script=made))


def written(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def counting(script: str, files: Iterable[str], *, is_module: bool = False) -> set[str]:
    """Return the files whose change is one of the script's content."""
    found = set()
    for name in files:
        before, text = content(script, is_module=is_module), Path(name).read_text()
        Path(name).write_text(f"{text}\nx = 2\n")
        if content(script, is_module=is_module) != before:
            found.add(name)
        Path(name).write_text(text)
    return found


IMPORTING = {
    "train.py": "import blk, torch, json\ndef late():\n    from pkg.deep import layers, Net\nfrom stars import *\n",
    "blk.py": "try:\n    import fast_blk\nexcept ImportError:\n    pass\nimport library.tools\n",
    "pkg/__init__.py": "",
    "pkg/deep/__init__.py": "from . import heads\nfrom ..common import sizes",
    "pkg/deep/layers.py": "",
    "pkg/deep/heads.py": "",
    "pkg/common.py": "import importlib.metadata",
    "stars/__init__.py": "__all__ = ['bright']",
    "stars/bright.py": "",
    "src/library/tools.py": "",
}
LYING_BY = {
    "other.py": "import train",
    "notes/blk2.py": "",
    "pkg/deep/unused.py": "",
    "pkg/unused.py": "",
    "lib/json.py": "",
    "stars/deep/far.py": "",
}


def test_the_content_of_a_script_is_that_of_the_modules_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(IMPORTING | LYING_BY)

    assert counting("train.py", IMPORTING | LYING_BY) == set(IMPORTING)
    assert counting("other.py", IMPORTING | LYING_BY) == {"other.py", *IMPORTING}
    of_module = {"pkg/__init__.py", "pkg/deep/__init__.py", "pkg/deep/layers.py", "pkg/deep/heads.py", "pkg/common.py"}
    assert counting("pkg.deep.layers", IMPORTING | LYING_BY, is_module=True) == of_module
    before = content("train.py")
    written({"new.py": ""})
    assert content("train.py") == before
    written({"fast_blk.py": ""})
    assert content("train.py") != before, "a module that was missing is there"


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module",
        "__import__(name)",
        "import hydra",
        "exec(open(name).read())",
        "from blk import x\n",
    ],
)
def test_all_files_are_content_where_names_are_known_only_by_a_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written({"train.py": text, "blk.py": "for x in y\n", "deep/other.py": ""})

    assert counting("train.py", ["train.py", "blk.py", "deep/other.py"]) == {"train.py", "blk.py", "deep/other.py"}


def test_what_a_script_may_import_is_part_of_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["train.py", "blk.py", "pkg/__init__.py", "pkg/deep/__init__.py", "pkg/deep/layers.py"]
    others = [
        ".hidden/a.py",
        "venv/pyvenv.cfg",
        "venv/lib/a.py",
        "lib/site-packages/a.py",
        "pkg/__pycache__/a.py",
        "a.md",
    ]
    for name in (*files, *others):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("import importlib")
    elsewhere = tmp_path.parent / "elsewhere.py"
    elsewhere.write_text("x = 1")
    Path("link.py").symlink_to(elsewhere)
    Path("around").symlink_to(tmp_path)
    scripts = (Script(target="train.py"), Script(target="pkg.deep.layers", is_module=True))
    cases = [Case(model=script.text, batch_size=1, script=script) for script in scripts]

    def contents() -> list[dict[str, str] | None]:
        return [Contents().of(case) for case in cases]

    first = contents()
    for name in (*others, elsewhere):
        Path(name).write_text("x = 2")
    assert contents() == first
    assert [list(each or ()) for each in first] == [["train.py"], ["pkg.deep.layers"]]
    seen = [first]
    for name in files:
        Path(name).write_text("import importlib, x")
        seen.append(contents())
    Path("pkg/more.py").write_text("")
    seen.append(contents())
    for each in zip(*seen, strict=True):
        assert len({str(found) for found in each}) == len(seen)


def test_the_content_of_a_script_is_read_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "a.py", "b.py", "data/c.py", "data/d.py", "data/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import importlib\n#")
    script = Script(target=str(tmp_path / "train.py"))
    case = Case(model=script.text, batch_size=1, script=script)

    def counts(name: str) -> bool:
        before = Contents().of(case)
        (tmp_path / name).write_text((tmp_path / name).read_text() + "0")
        return Contents().of(case) != before

    assert counts("data/c.py")
    monkeypatch.setattr(
        "actbench.model.importable.MOST_ENTRIES", 6
    )  # the four of the folder, and not the three of data
    assert not counts("data/c.py")
    assert counts("b.py")
    monkeypatch.setattr("actbench.model.importable.MOST_FILES", 1)
    assert not counts("b.py")
    assert counts("a.py")
    monkeypatch.setattr("actbench.model.importable.MOST_BYTES", 4)
    assert not counts("a.py")


def test_the_file_of_a_module_is_found_without_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "evil" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("raise SystemExit('it ran')")
    (inner / "__main__.py").write_text("print(1)")
    (inner / "tool.py").write_text("print(2)")
    monkeypatch.chdir(tmp_path)

    assert file_of_module("evil.inner") == str(inner / "__main__.py")
    assert file_of_module("evil.inner.tool") == str(inner / "tool.py")
    assert [file_of_module(name) for name in ("evil", "evil.none", "none.at.all", "sys", "", "..", "evil.inner.")] == (
        [None] * 7
    )
    assert not [name for name in sys.modules if name.startswith("evil")]

    made = Case(model="-m evil.inner", batch_size=1, script=Script(target="evil.inner", is_module=True))
    assert list(Contents().of(made) or ()) == ["evil.inner"]


def test_a_module_is_found_in_a_folder_that_has_no_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "package" / "deep"
    deep.mkdir(parents=True)
    (deep.parent / "__init__.py").touch()
    (deep / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    assert file_of_module("package.deep.train") == str(deep / "train.py")
    assert file_of_module("package.other.train") is None
