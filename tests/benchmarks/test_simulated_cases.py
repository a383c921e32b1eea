"""What a simulated case costs: `benchmarks/simulated_cases.py`; no times."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from actbench.workload import names


def test_the_models_are_known_and_each_scheme_has_a_case(script: Any) -> None:
    for model in script.MODELS:
        assert names.parse_model_name(model).name
        assert [case.scheme for case in script.cases(model, script.SCHEMES)] == list(script.SCHEMES)


CHILDREN = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("simulated_cases", sys.argv[1])
sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.MODELS["tiny-roberta"] = {"sequence_length": 8, "batch_size": 2, "device_profile": "cpu"}
runs = script.measure(script.cases("tiny-roberta", ["exact", "resilu2"]), rounds=1)
print(json.dumps({name: run._asdict() for name, run in runs.items()}))
"""


@pytest.mark.exhaustive
def test_a_case_is_run_in_a_process_of_its_own_and_a_failure_is_told(script: Any) -> None:
    done = subprocess.run([sys.executable, "-c", CHILDREN, script.__file__], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert runs["exact"]["user_seconds"] > 0
    assert not runs["exact"]["failure"]
    assert runs["exact"]["peak_bytes"] > 0
    assert "resilu2" in runs["resilu2"]["failure"]
    assert runs["resilu2"]["peak_bytes"] is None


def test_the_fastest_run_of_each_case_counts(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([3.0, 2.0, 1.0, 4.0])
    monkeypatch.setattr(script, "forked", lambda case: script.Run(next(seconds), 7))
    runs = script.measure(script.cases("resnet50", ["exact", "smaq"]), rounds=2)

    assert {name: run.user_seconds for name, run in runs.items()} == {"exact": 1.0, "smaq": 2.0}


def test_cases_with_their_times_and_without_take_turns(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    seconds = iter((4.0, 2.0, 3.0, 3.0))

    def forked(case: Any, *, untimed: bool = False) -> Any:
        asked.append(untimed)
        return script.Run(next(seconds), 7)

    monkeypatch.setattr(script, "forked", forked)

    [(scheme, runs)] = script.beside_untimed(script.cases("resnet50", ["exact"]), 2).items()
    assert (scheme, [run.user_seconds for run in runs]) == ("exact", [3.0, 2.0])
    assert asked == [False, True, False, True]
