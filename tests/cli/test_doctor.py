from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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


def test_doctor_ends_with_its_verdict(cli: Any) -> None:
    from actbench.cli.doctor import examine

    assert cli("doctor").out.splitlines()[-1] == verdict(examine())


def test_doctor_has_a_row_for_each_extra(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = extras.version_of
    monkeypatch.setattr(extras, "version_of", lambda name: None if name in ("peft", "matplotlib") else own(name))
    monkeypatch.setenv("COLUMNS", "200")
    lines = cli("doctor").out.splitlines()
    rows = {name: " ".join(line.split()) for line in lines for name in extras.PURPOSES if f"Extra: {name} " in line}

    assert rows.keys() == extras.PURPOSES.keys()
    assert rows["lightning"].startswith(f"ok Extra: lightning lightning {own('lightning')} (the callback for Lightning")
    assert rows["peft"] == ('– Extra: peft peft is not installed (schemes lora and qlora) pip install "actbench[peft]"')
    assert "matplotlib is not installed" in rows["train"]


def test_each_extra_has_a_purpose() -> None:
    written = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for_developers = {"test", "lint", "docs"}

    assert set(written["project"]["optional-dependencies"]) - for_developers == set(extras.PURPOSES)
