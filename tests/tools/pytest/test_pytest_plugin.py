"""pytest's plug-in, run as its users run it: tests with the mark in a folder of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import actbench
from actbench.tools.pytest import baseline
from actbench.tools.pytest.baseline import Reading

pytest_plugins = ["pytester"]
Run = Callable[..., pytest.RunResult]

TRAINING = """
import pytest, torch
from torch import nn

def train(width, device="cuda", steps=4):
    model = nn.Sequential(nn.Linear(width, width), nn.GELU()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(64, width, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
"""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what a simulation imports: pytester forgets the modules that a run inside of this one imports first."""
    for _ in range(2):  # the second one prepares Inductor, which the first one may have imported
        with actbench.simulate("rtx-4090"):
            weight = torch.ones(4, device="cuda", requires_grad=True)
            weight.sum().backward()
            torch.optim.SGD([weight]).step()


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run_file(text: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_step=TRAINING + text)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)

    return run_file


def test_a_step_that_fits_passes_and_is_in_the_table(run: Run) -> None:
    found = run(
        """
@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.gpu_memory(device="rtx-4090", limit="1 GiB")
def test_fits(width):
    train(width)
    assert False, "the training loop has ended the block"

class TestSteps:
    @pytest.mark.gpu_memory(device="v100-16gb")
    def test_whole_card(self):
        train(256, steps=1)

def test_without_mark():
    pass
""",
        "--gpu-memory",
    )

    found.assert_outcomes(passed=4)
    found.stdout.fnmatch_lines(["*GPU memory, simulated*", "*v100-16gb*", "*test_fits?256?*rtx-4090 *1.00 GiB*"])
    found.stdout.no_fnmatch_line("*test_without_mark*")


def test_a_step_that_does_not_fit_fails_with_its_peak_and_who_holds_it(run: Run) -> None:
    found = run('\n@pytest.mark.gpu_memory(device="rtx-4090", limit="10 MiB")\ndef test_large():\n    train(2048)\n')

    found.assert_outcomes(failed=1)
    found.stdout.re_match_lines(
        [
            r'gpu_memory: the step does not fit into limit="10 MiB" on rtx-4090: .* missing. Its peak is .*',
            r".*by the line that made them",
            r"\| test_step.py:5 model = nn.Sequential.* \| weights \| 16.01 MiB \|.*",
            r".*by module",
            r"\| 0 \| weights, 2 more \|.*",
        ]
    )
    found.stdout.no_fnmatch_line("*exception*")


@pytest.mark.parametrize(
    ("mark", "why"),
    [
        ('"20 GiB", device="rtx-4090"', "'20 GiB' has no name"),
        ('device="rtx-4090", limits="20 GiB"', "it has no argument 'limits'"),
        ('limit="20 GiB"', "device=None: name a card"),
        ('device="rtx-4091"', "device='rtx-4091': there is no such device profile; did you mean"),
        ('device="rtx-4090", limit="20"', "limit='20' is not an amount of memory"),
        ('device="rtx-4090", limit=20', "limit=20: write a number with its unit as a text"),
        ('device="rtx-4060", limit="20 GiB"', "limit='20 GiB' is more than rtx-4060 has"),
        ('device="missing.toml"', "device='missing.toml' cannot be read"),
    ],
)
def test_a_mark_that_cannot_be_used_fails_at_collection(run: Run, mark: str, why: str) -> None:
    found = run(f"\n@pytest.mark.gpu_memory({mark})\ndef test_marked():\n    raise SystemError\n")

    found.assert_outcomes(errors=1)
    found.stdout.fnmatch_lines([f"*test_step.py::test_marked: gpu_memory: {why.replace('[', '[[]')}*"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("async def test_marked():\n    pass\n", "an async test"),
        (
            "import hypothesis\n@hypothesis.given(hypothesis.strategies.none())\ndef test_it(_):\n    pass\n",
            "hypothesis",
        ),
        ("import unittest\nclass Test(unittest.TestCase):\n    def test_it(self):\n        pass\n", "only functions"),
    ],
)
def test_a_test_whose_body_does_not_run_once_is_refused(run: Run, text: str, why: str) -> None:
    found = run(f'\npytestmark = pytest.mark.gpu_memory(device="rtx-4090")\n{text}')

    found.assert_outcomes(errors=1)
    found.stdout.fnmatch_lines([f"*gpu_memory: *{why}*"])


def test_what_fails_in_the_body_is_told_as_ever(run: Run) -> None:
    found = run(
        """
pytestmark = pytest.mark.gpu_memory(device="rtx-4090")

def test_wrong():
    assert torch.ones(3, device="cuda").shape == (4,)

def test_skipped():
    pytest.skip("not today")

def test_without_step():
    torch.ones(4, device="cuda")

def test_without_training():
    nn.Linear(4, 4).to("cuda")(torch.ones(4, device="cuda"))

@pytest.mark.xfail(strict=True)
def test_expected():
    train(8192)

@pytest.mark.gpu_memory(device="rtx-4090", limit="1 MiB")
@pytest.mark.xfail(strict=True)
def test_expected_to_be_too_large():
    train(1024)
""",
    )

    found.assert_outcomes(passed=1, failed=3, skipped=1, xfailed=1)
    found.stdout.fnmatch_lines(["E*torch.Size*== (4,)", "gpu_memory: no training step ended*", "*XPASS(strict)*"])


def test_real_training_before_and_after_changes_nothing(run: Run) -> None:
    found = run(
        """
def gradient():
    model = train(64, "cpu", steps=1)
    model(torch.ones(2, 64)).square().mean().backward()
    return model[0].weight.grad

def test_first():
    torch.manual_seed(0)
    pytest.before = gradient()
    assert pytest.before.abs().sum() > 0

@pytest.mark.gpu_memory(device="rtx-4090", limit="1 GiB")
def test_marked():
    train(256)

def test_between():
    torch.manual_seed(0)
    assert torch.equal(gradient(), pytest.before)
    assert not torch.cuda.is_available()

@pytest.mark.gpu_memory(device="rtx-4060", limit="1 MiB")
def test_marked_again():
    train(2048)

def test_last():
    torch.manual_seed(0)
    assert torch.equal(gradient(), pytest.before)
""",
        "--gpu-memory",
    )

    found.assert_outcomes(passed=4, failed=1)
    found.stdout.fnmatch_lines(["*test_marked *rtx-4090*", "*test_marked_again *rtx-4060*"])


GROWING = """
@pytest.mark.gpu_memory(device="rtx-4090", limit="1 GiB")
def test_step():
    train({width})

@pytest.mark.gpu_memory(device="rtx-4090")
def test_other():
    train(256)
"""


def test_peaks_are_compared_with_those_of_the_last_passing_run(run: Run, pytester: pytest.Pytester) -> None:
    file, limits = pytester.path / "peaks.json", ("--gpu-memory-fail-on-increase", "2%")
    options = ("--gpu-memory-baseline", "peaks.json")

    run(GROWING.format(width=1024), *options, *limits).assert_outcomes(passed=2)
    first = baseline.read(file)
    assert first.keys() == {"test_step.py::test_step", "test_step.py::test_other"}
    reading = first["test_step.py::test_step"]
    assert sum(reading.held_bytes.values()) == reading.peak_bytes

    grown = run(GROWING.format(width=1056), *options, *limits)
    grown.assert_outcomes(passed=1, failed=1)
    grown.stdout.re_match_lines(
        [
            r"gpu_memory: the peak has grown by more than 2%: it is .* MiB in the .*\.",
            # of 1056 by 1056 weights in place of 1024 by 1024
            r"The last passing run had .* MiB; now \+.* KiB \(\+3\.2 %\): .*gradients \+260\.00 KiB, .*\.",
        ]
    )
    assert baseline.read(file) == first

    run(GROWING.format(width=1056), *options).assert_outcomes(passed=2)
    assert baseline.read(file)["test_step.py::test_step"].peak_bytes > reading.peak_bytes
    less = run(GROWING.format(width=512), *options, *limits, "--gpu-memory", "-k", "test_step")
    less.stdout.re_match_lines([r".*test_step.py::test_step .*-\d\d\.\d %"])
    assert baseline.read(file).keys() == first.keys()


def test_processes_of_xdist_report_to_the_first_one(run: Run, pytester: pytest.Pytester) -> None:
    text = """
@pytest.mark.parametrize("width", [256, 512, 768])
@pytest.mark.gpu_memory(device="rtx-4090")
def test_step(width):
    train(width + MORE)
"""
    options = ("--gpu-memory-baseline", "peaks.json")
    names = {width: f"test_step.py::test_step[{width}]" for width in (256, 512, 768)}
    run(f"MORE = 0\n{text}", *options, "-k", "256 or 512").assert_outcomes(passed=2)
    first = baseline.read(pytester.path / "peaks.json")

    found = run(f"MORE = 128\n{text}", *options, "-n", "2", "--gpu-memory", "--gpu-memory-fail-on-increase", "10 %")

    found.assert_outcomes(passed=2, failed=1)
    found.stdout.fnmatch_lines([f"*test_step?{width}?*rtx-4090*" for width in names])
    stored = baseline.read(pytester.path / "peaks.json")
    assert stored.keys() == set(names.values())
    assert stored[names[512]] == first[names[512]]
    assert stored[names[256]].peak_bytes > first[names[256]].peak_bytes


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--gpu-memory-fail-on-increase", "2%"), "name the peaks to compare with by --gpu-memory-baseline FILE"),
        (("--gpu-memory-baseline", "x", "--gpu-memory-fail-on-increase", "2"), "write a share of the peak, such as 2%"),
        (("--gpu-memory-baseline", "wrong.json"), "--gpu-memory-baseline *wrong.json: this is not a file of peaks"),
        (("--gpu-memory-baseline", "."), "*is a folder*"),
    ],
)
def test_an_option_that_cannot_be_used_is_an_error(
    run: Run, pytester: pytest.Pytester, arguments: tuple[str, ...], why: str
) -> None:
    (pytester.path / "wrong.json").write_text('{"peaks": 1}')

    found = run("\ndef test_step():\n    pass\n", *arguments)

    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([f"*{why}*"])


def test_runs_that_end_together_all_store_their_peaks(tmp_path: Path) -> None:
    file = tmp_path / "peaks.json"
    reading = Reading(device="rtx-4090", peak_bytes=1, needed_bytes=1, limit_bytes=1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: baseline.merge(file, {f"test_{number}": reading}), range(24)))

    assert len(json.loads(file.read_text())["tests"]) == 24
    assert [each.name for each in tmp_path.iterdir()] == ["peaks.json"]


def test_other_suites_import_neither_actbench_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, sys\n\ndef test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('actbench')\n"
        "    assert not {'actbench', 'torch', 'rich', 'pydantic'} & sys.modules.keys()\n"
        "    assert 'TORCHINDUCTOR_CACHE_DIR' not in os.environ\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", str(tmp_path)]

    done = subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin"}, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
