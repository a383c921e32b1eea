from __future__ import annotations

import tomllib
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any, get_args

import pytest
from strangerspackage import installed_in

from actbench import plugins
from actbench.cli import extras
from actbench.cli.doctor import Check, verdict

GOOD = (Check("Python", "ok", "3.12"), Check("CUDA", "ok", "H100"), Check("Extra: cuda", "ok", "14"))


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("Python", {}, "All works here: "),
        ("Extra: cuda", {"verdict": "optional"}, 'this installs them: pip install "actbench[cuda]".'),
        ("CUDA", {"verdict": "optional"}, "to measure on a GPU: install the driver."),
        (
            "Python",
            {"verdict": "missing", "advice": "install it"},
            "actbench does not work here yet. Python: install it.",
        ),
    ],
)
def test_the_verdict_is_one_sentence_on_what_works_and_what_mends_the_rest(name: str, changed: Any, told: str) -> None:
    checks = [replace(each, **changed) if each.name == name else each for each in GOOD]
    checks = [replace(each, advice="install the driver") if each.name == "CUDA" else each for each in checks]

    assert told in verdict(checks)


def test_doctor_begins_and_ends_with_its_verdict(cli: Any) -> None:
    from actbench.cli.doctor import examine

    first, *_, last = cli("doctor").out.splitlines()
    assert first == last == verdict(examine())


def test_doctor_has_a_row_for_each_extra(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = extras.version_of
    monkeypatch.setattr(extras, "version_of", lambda name: None if name in ("peft", "scikit-learn") else own(name))
    monkeypatch.setenv("COLUMNS", "300")
    lines = cli("doctor").out.splitlines()
    names = [extra.name for extra in extras.extras()]
    rows = {name: " ".join(line.split()) for line in lines for name in names if f"Extra: {name} " in line}

    assert list(rows) == names
    assert rows["lightning"].startswith(f"ok Extra: lightning lightning {own('lightning')} (the callback for Lightning")
    assert rows["peft"] == (
        '– Extra: peft peft is not installed (schemes lora and qlora: adapters of peft) pip install "actbench[peft]"'
    )
    liger = "kernels of Liger on a GPU"
    assert f"(scheme chunked_loss: {liger}, for chunked_loss:liger; scheme liger: {liger})" in rows["liger"]
    assert "scikit-learn is not installed" in rows["train"]


def test_doctor_of_an_installation_that_names_no_extras(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.metadata", lambda package: Message())
    monkeypatch.setattr("actbench.cli.doctor._cuda", lambda: Check("CUDA", "ok", "H100"))
    ended = cli("doctor")

    assert ended.status == 0
    assert ended.out.splitlines()[0].endswith("whether kernels for GPUs do is not; install actbench again, by pip.")
    assert "Extra: " not in ended.out


def test_each_extra_has_a_purpose() -> None:
    written = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for_developers = {"test", "lint", "docs"}

    needed = [name for name in written["project"]["optional-dependencies"] if name not in for_developers]
    assert [extra.name for extra in extras.extras()] == needed


def test_the_core_names_only_the_extras_that_no_plug_in_declares() -> None:
    declared = {
        name
        for group in get_args(plugins.Group)
        for plugin in plugins.installed(group).values()
        for name in extras.declared_by(plugin.load())
    }

    assert declared >= {"torchao", "bitsandbytes", "peft", "liger", "train", "datasets", "html", "cluster"}
    assert not declared & extras.OWN.keys()


@pytest.mark.slow
def test_an_extra_of_another_package_is_a_row_with_what_its_plug_in_needs_it_for(tmp_path: Path) -> None:
    module = (
        "from actbench.report.exporting import ExportFormat\n"
        "PDF = ExportFormat('Write a PDF.', str, extras={'fast': 'vector graphics'})\n"
    )
    extra = 'Provides-Extra: dev\nProvides-Extra: fast\nRequires-Dist: not-there>=2; extra == "fast"\n'
    run = installed_in(tmp_path, "[actbench.exports]\npdf = theirs:PDF\n", {"theirs": module}, extra)

    lines = [" ".join(line.split()) for line in run("doctor").stdout.splitlines()]

    assert [line for line in lines if "theirs[" in line] == [
        '– Extra: theirs[fast] not-there is not installed (export pdf: vector graphics) pip install "theirs[fast]"'
    ]
