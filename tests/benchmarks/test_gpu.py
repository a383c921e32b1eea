"""`make gpu` as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_missing_package_is_named_with_the_command(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path)])
    monkeypatch.setitem(script.NEEDED, "no_such_package", "no-such-package")

    assert script.main() == 2
    err = capsys.readouterr().err
    assert "lacks" in err
    assert f"{sys.executable} -m pip install" in err
    assert "no-such-package" in err


def test_what_is_needed_is_what_the_package_declares(script):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {text.split(">")[0].split("[")[0] for text in project["dependencies"]}

    assert declared | {"cupy-cuda13x", "pytest", "pytest-timeout", "pytest-xdist"} == set(script.NEEDED.values())


@pytest.mark.exhaustive
def test_the_layout_works_without_an_installation(script, tmp_path):
    script.lay_out(tmp_path)
    code = (
        "import actbench, actbench.run.recipes; from actbench.ops import rawkernel;"
        "print(actbench.__file__, 'quickstart' in actbench.run.recipes.names(), len(rawkernel.source('mask')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )

    place, known, length = done.stdout.split()
    assert place.startswith(str(tmp_path))
    assert known == "True"
    assert int(length) > 0


def test_entry_points_are_found_without_an_installation(script, tmp_path):
    import tomllib

    import torch

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    declared = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
    libraries, layout = tmp_path / "libraries", tmp_path / "layout"
    for folder in (libraries, layout):
        folder.mkdir()
    for source in Path(torch.__file__).parents[1].iterdir():  # all that is installed there but actbench
        if "actbench" not in source.name:
            (libraries / source.name).symlink_to(source)
    script.lay_out(layout)
    code = (
        "import json, sys; from importlib.metadata import entry_points, version; import actbench.cli;"
        "groups = json.loads(sys.argv[1]);"
        "print(json.dumps({group: {each.name: each.value for each in entry_points(group=group) if each.dist.name =="
        " 'actbench'} for group in groups}));"
        "print(actbench.cli.__file__, version('actbench'))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (layout, libraries)))}
    command = [sys.executable, "-S", "-c", code, json.dumps(list(declared))]  # -S: nothing else that is installed
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)

    assert done.returncode == 0, done.stderr
    found, place = done.stdout.splitlines()
    assert json.loads(found) == declared
    assert place == f"{layout}/actbench/cli/__init__.py {pyproject['tool']['setuptools_scm']['fallback_version']}"


def test_every_step_fits_and_is_logged(script, tmp_path):
    step = script.Step("one", ("-c", "print('said'); raise SystemExit(3)"), 60)

    ended, seconds = script.run(step, 60, dict(os.environ), tmp_path / "one.log")

    assert ended == "failed with status 3"
    assert 0 < seconds < 60
    assert (tmp_path / "one.log").read_text() == "said\n"


def test_a_step_that_takes_too_long_is_stopped(script, tmp_path):
    step = script.Step("slow", ("-c", "import time; time.sleep(60)"), 60)
    assert script.run(step, 0.3, dict(os.environ), tmp_path / "slow.log")[0].startswith("stopped after")


def test_only_the_named_steps_run(script, monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(script, "missing", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(script, "run", lambda step, *_: ("ok", 1.0))
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path), "--step", "kernels", "--step", "calibrate"])

    assert script.main() == 0
    rows = (tmp_path / "summary.txt").read_text().splitlines()
    assert [row.split()[0] for row in rows] == ["kernels", "calibrate"]


def test_steps_that_read_no_clock_run_side_by_side_before_those_that_do(script, monkeypatch, tmp_path):
    (tmp_path / "logs").mkdir()
    both = threading.Barrier(2)
    ran = []

    def run(step, seconds, environment, log):
        if not step.is_timed:
            both.wait(timeout=30)
        ran.append(step.name)
        return "ok", 1.0

    monkeypatch.setattr(script, "run", run)
    plain = {name: script.Step(name, (), 60, is_timed=name in "bd") for name in "abcd"}

    rows = script.run_all(list(plain.values()), tmp_path, {}, time.monotonic() + 60)

    assert sorted(ran[:2]) == ["a", "c"]
    assert ran[2:] == ["b", "d"]
    assert [name for name, _, _ in rows] == ["a", "c", "b", "d"]


def test_a_step_under_a_program_that_is_not_there_says_so(script, tmp_path):
    step = script.Step("checked", ("-c", ""), 60, under=("no-such-program",))

    assert (
        script.run(step, 60, dict(os.environ), tmp_path / "one.log")[0] == "not run: there is no no-such-program here"
    )


def test_the_steps_are_those_of_the_target(script, tmp_path):
    found = {step.name: step for step in script.steps(tmp_path)}

    unclocked = {"tests", "large", "memcheck", "racecheck", "operators", "run-train", "run-nanogpt", "run-vit"}
    unclocked |= {"largest-resnet50", "largest-bert"}
    assert {name for name, step in found.items() if not step.is_timed} == unclocked
    timed = ["kernels", "calibrate", "quickstart", "fewbit-roberta", "resnet50", "actnn-memory", "gact-bert"]
    assert [name for name, step in found.items() if step.is_timed] == [
        *timed,
        "captured",
        "compiled",
        "fit",
        "finetune-8b",
    ]
    assert any("tests/kernels/test_stepwise.py" in argument for argument in found["tests"].command)
    assert any("tests/measuring/meters/test_cuda.py" in argument for argument in found["tests"].command)
