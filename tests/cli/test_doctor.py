from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actbench.cli.doctor import Check, verdict

GOOD = (Check("Python", "ok", "3.12"), Check("CUDA", "ok", "H100"), Check("CuPy", "ok", "14"))


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("Python", {}, "All works here: "),
        ("CuPy", {"verdict": "optional"}, "this installs them: pip install 'actbench[cuda]'."),
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
