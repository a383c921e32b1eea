"""What `make gpu` runs: the GPU tests, the kernels, and sweeps with the CUDA meter, inside ten minutes.

It needs no installed actbench and no virtual environment, only a Python with the packages below. Steps that read bytes
alone run side by side, then those that read a clock, one after the other. Records go to the folder given, a short table
comes last. Exit status: 0 all went well, 1 a step failed or was cut off, 2 none could run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {
    "torch": "torch",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "huggingface_hub": "huggingface-hub",
    "safetensors": "safetensors",
    "cupy": "cupy-cuda13x",
    "numba": "numba",
    "numpy": "numpy",
    "jinja2": "jinja2",
    "pandas": "pandas",
    "pydantic": "pydantic",
    "typer": "typer",
    "rich": "rich",
    "filelock": "filelock",
    "platformdirs": "platformdirs",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
    "pytest_timeout": "pytest-timeout",
}
"""Packages by the name that is imported."""

BUDGET_SECONDS = 560.0


@dataclass(frozen=True)
class Step:
    """A command of its own.

    Attributes:
        name: In the table, and of its log.
        command: Arguments for Python.
        most_seconds: After which it is stopped; less where less of the budget is left.
        is_timed: Whether it reads a clock, so that nothing else may run meanwhile.
        under: The program that runs Python, with its arguments; none for Python itself.
    """

    name: str
    command: tuple[str, ...]
    most_seconds: float
    is_timed: bool = True
    under: tuple[str, ...] = ()


CASES = (
    *("roberta-base:32", "roberta-base:32:fewbit:3+randomized:0.2", "resnet50:32", "resnet50:32:actnn:L2"),
    *("bert-large-uncased:16", "bert-large-uncased:16:gact:L2", "swin_t:16", "densenet201:16", "llama-3.2-1b:1"),
)
"""Steps whose operators are asked for their temporaries."""

CHECKED = "(float16 and not bfloat16 and not activate or sketch or bitpack or words) and not beyond"
"""Kernel tests that run under compute-sanitizer: one type of each kernel, which has one source for all types."""


def steps(results: Path) -> list[Step]:
    """Return what runs, in order."""
    tests = [str(path) for path in sorted((ROOT / "tests").rglob("*.py")) if _is_for_gpu(path)]
    pytest = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")  # which warns of xdist
    kernels = (str(ROOT / "benchmarks" / "kernels.py"), "--device", "cuda", "--output", str(results))
    profile = (*("--output", str(results / "calibrated.toml")), "--export-json", str(results / "calibrated.json"))
    return [
        Step("tests", (*pytest, "-n", "8", "-k", "not beyond", *tests), 240, is_timed=False),
        Step("large", (*pytest, "-k", "beyond", str(ROOT / "tests" / "kernels")), 240, is_timed=False),
        *(_sanitized(tool, (*pytest, "-k", CHECKED, str(ROOT / "tests" / "kernels"))) for tool in TOOLS),
        Step("operators", _operators(results), 150, is_timed=False),
        *_scripts(results),
        *_largest(results),
        Step("kernels", (*kernels, "--seconds", "0.2", "--size", "16384x4096"), 150),
        Step(
            "calibrate", ("-m", "actbench", "calibrate", "--device", "cuda", "--force", "--budget", "70", *profile), 110
        ),
        *_sweeps(results),
        Step("captured", _captured(results), 100),
        # as far as the budget goes
        Step("compiled", (*kernels, "--compile", "--operator", "layer", "--size", "4096x4096"), 100),
        Step("fit", _fit(results), 200),
        _sweep("finetune-8b", results, 200, *DECODER, "-s", "checkpoint+chunked_loss:8+lora:16"),
    ]


TOOLS = ("memcheck", "racecheck")


def _sanitized(tool: str, command: tuple[str, ...]) -> Step:
    under = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
    return Step(tool, command, 200, is_timed=False, under=under)


def _operators(results: Path) -> tuple[str, ...]:
    return str(ROOT / "benchmarks" / "cuda_operators.py"), "--output", str(results / "operators.json"), *CASES


def _captured(results: Path) -> tuple[str, ...]:
    models = ("resnet50", "128", "exact", "actnn:L1", "actnn:L2", "actnn:L3")
    return str(ROOT / "benchmarks" / "captured.py"), "--output", str(results / "captured.json"), *models


def _scripts(results: Path) -> list[Step]:
    folder = ROOT / "tests" / "tools" / "script" / "scripts"
    scripts = {
        "train": (str(ROOT / "examples" / "train.py"),),
        "nanogpt": (str(folder / "nanogpt.py"),),
        "vit": (str(folder / "vit.py"), "--samples", "512"),
    }
    run = ("-m", "actbench", "run", "--meter", "cuda", "--export-json")
    return [
        Step(f"run-{name}", (*run, str(results / f"run-{name}.json"), *script), 120, is_timed=False)
        for name, script in scripts.items()
    ]


FEW = ("--meter", "cuda", "--weights", "random", "--steps", "10", "--seconds", "0.5", "--timeout", "100")
PICTURES = ("torchvision:resnet50", "--optimizer", "sgd-momentum")
TEXT = ("bert-large-uncased", "--task", "sequence-classification", "--attention", "eager", "--sequence-length", "128")
DECODER = ("llama-3.1-8b", "-b", "1", "--sequence-length", "2048", "--dtype", "bf16", "--timeout", "190")


def _sweep(name: str, results: Path, most_seconds: float, *arguments: str, is_timed: bool = True) -> Step:
    output = ("--output", str(results / name))
    return Step(name, ("-m", "actbench", "sweep", *FEW, *arguments, *output), most_seconds, is_timed=is_timed)


def _largest(results: Path) -> list[Step]:
    """Return searches for the largest batches in a T4's memory, of which nothing is compared in time."""
    card = ("--max-batch", "--memory-limit", "14.7GiB", "--device-profile", "t4")
    return [
        _sweep("largest-resnet50", results, 170, *PICTURES, "-s", "actnn:L3", *card, is_timed=False),
        _sweep("largest-bert", results, 170, *TEXT, "-s", "gact:L2", *card, is_timed=False),
    ]


def _sweeps(results: Path) -> list[Step]:
    """Return sweeps whose rows are compared in time."""
    return [
        _sweep("quickstart", results, 150, "quickstart"),
        _sweep("fewbit-roberta", results, 120, "fewbit-roberta"),
        _sweep("resnet50", results, 120, *PICTURES, "-b", "64", "-s", "checkpoint", "-s", "offload"),
        _sweep(
            *("actnn-memory", results, 120, *PICTURES, "-b", "128"),
            *(word for spec in ("actnn:L1", "actnn:L2", "actnn:L3", "gact:L2") for word in ("-s", spec)),
        ),
        _sweep("gact-bert", results, 120, *TEXT, "-b", "64", "-s", "gact:L2", "-s", "gact:L3"),
    ]


def _fit(results: Path) -> tuple[str, ...]:
    profile = ("--device-profile", str(results / "calibrated.toml"), "--measure", "--memory-limit", "10GiB")
    fit = ("-m", "actbench", "fit", "roberta-base", "-b", "128", *profile, "--budget", "60")
    return (*fit, "--output", str(results / "fit"))


def _is_for_gpu(path: Path) -> bool:
    """Return whether a file may hold tests with the marker; those of kernels get it from a fixture."""
    return path.name.startswith("test_") and (path.parent.name == "kernels" or "mark.gpu" in path.read_text())


def missing() -> list[str]:
    """Return the packages that this Python cannot import, as pip calls them."""
    return [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]


def lay_out(folder: Path) -> None:
    """Make the packages as an installation has them, with their entry points beside them."""
    for source in (ROOT / "src").iterdir():
        if source.suffix == ".py" or (source / "__init__.py").exists():
            (folder / source.name).symlink_to(source)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, version = pyproject["project"], pyproject["tool"]["setuptools_scm"]["fallback_version"]
    metadata = folder / f"actbench-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: actbench\nVersion: {version}\n")
    groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
    sections = (
        f"[{group}]\n" + "".join(f"{name} = {of}\n" for name, of in each.items()) for group, each in groups.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(sections))


def run(step: Step, seconds: float, environment: dict[str, str], log: Path) -> tuple[str, float]:
    """Run a step, its output to a file, the end of it to here; return how it ended and the seconds it took."""
    if step.under and shutil.which(step.under[0]) is None:
        return f"not run: there is no {step.under[0]} here", 0.0
    start = time.monotonic()
    with log.open("wb") as file:
        command = [*step.under, sys.executable, *step.command]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            status = process.wait(timeout=seconds)
            ended = "ok" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
            ended = f"stopped after {seconds:.0f} s"
    said = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:])
    print(f"\n== {step.name}: {ended}\n{said}", flush=True)
    return ended, time.monotonic() - start


def run_all(asked: list[Step], results: Path, environment: dict[str, str], end: float) -> list[tuple[str, str, float]]:
    """Run steps until a moment of the monotonic clock; return how each ended and its seconds, in the order given."""

    def begun(step: Step) -> tuple[str, str, float]:
        seconds = min(step.most_seconds, end - time.monotonic())
        if seconds < 5:
            return step.name, "not begun, no time left", 0.0
        row = (step.name, *run(step, seconds, environment, results / "logs" / f"{step.name}.log"))
        with (results / "summary.txt").open("a") as file:  # now, since the whole may be stopped
            file.write(_line(*row))
        return row

    beside = [step for step in asked if not step.is_timed]
    with ThreadPoolExecutor(max(len(beside), 1)) as pool:
        rows = list(pool.map(begun, beside))
    return rows + [begun(step) for step in asked if step.is_timed]


def _line(name: str, ended: str, seconds: float) -> str:
    return f"{name:<18}{seconds:>6.0f} s  {ended}\n"


def main() -> int:
    """Run all steps and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder for records, tables and logs")
    names = [step.name for step in steps(Path())]
    parser.add_argument(
        "--step", action="append", choices=names, metavar="STEP", help=f"one of {', '.join(names)}; repeat"
    )
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="for all steps (default %(default)g)")
    asked = parser.parse_args()
    results: Path = asked.results.resolve()
    absent = missing()
    if absent:
        print(f"make gpu: {sys.executable} lacks {', '.join(absent)}; install them for it:", file=sys.stderr)
        print(f"    {sys.executable} -m pip install {' '.join(absent)}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print(f"make gpu: torch {torch.__version__} finds no CUDA device here", file=sys.stderr)
        return 2
    (results / "logs").mkdir(parents=True, exist_ok=True)
    (results / "summary.txt").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        chosen = [step for step in steps(results) if not asked.step or step.name in asked.step]
        rows = run_all(chosen, results, environment, time.monotonic() + asked.seconds)
    summary = "".join(_line(*row) for row in rows)
    (results / "summary.txt").write_text(summary)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; records and logs in {results}\n\n{summary}")
    return 0 if all(ended == "ok" for _, ended, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
