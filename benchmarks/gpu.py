"""What `make gpu` runs: the GPU tests, the kernels, and sweeps with the CUDA meter, inside ten minutes.

It needs no installed actbench and no virtual environment, only a Python with the packages below. Records go to the
folder given, a short table comes last. Exit status: 0 all went well, 1 a step failed or was cut off, 2 none could run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from itertools import chain
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
    "pandas": "pandas",
    "pydantic": "pydantic",
    "typer": "typer",
    "rich": "rich",
    "filelock": "filelock",
    "platformdirs": "platformdirs",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
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
    """

    name: str
    command: tuple[str, ...]
    most_seconds: float


def steps(results: Path) -> list[Step]:
    """Return what runs, in order."""
    tests = [str(path) for path in sorted((ROOT / "tests").rglob("*.py")) if _is_for_gpu(path)]
    few = ("--meter", "cuda", "--weights", "random", "--steps", "5", "--seconds", "0.5", "--timeout", "100")
    sweep = ("-m", "actbench", "sweep")
    into = ("--output", str(results))
    kernels = (str(ROOT / "benchmarks" / "kernels.py"),)
    profile = (*("--output", str(results / "calibrated.toml")), "--export-json", str(results / "calibrated.json"))
    card = ("--memory-limit", "14.7GiB")
    large = [
        ("-s", spec) for spec in ("checkpoint+chunked_loss:8+lora:16", "adam8bit+checkpoint+chunked_loss:8+release")
    ]
    fit = ("-m", "actbench", "fit", "roberta-base", "--device-profile", str(results / "calibrated.toml"), "--measure")
    return [
        Step("tests", ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *tests), 240),
        Step("kernels", (*kernels, "--device", "cuda", "--compile", "--output", str(results)), 150),
        Step("calibrate", ("-m", "actbench", "calibrate", "--device", "cuda", "--force", *profile), 130),
        Step("quickstart", (*sweep, "quickstart", *few, *into), 150),
        Step("fewbit-roberta", (*sweep, "fewbit-roberta", *few, *into), 120),
        Step("resnet50", (*sweep, "resnet50", *few, *card, *into), 200),
        Step("actnn-memory", (*sweep, "actnn-memory", *few, "--batch-size", "32", *into), 150),
        Step("t4-largest", (*sweep, "t4-largest", *few, *card, *into), 300),
        # as far as the budget goes, unless they are named
        Step("finetune-8b", (*sweep, "finetune-8b", *few, "--timeout", "300", *chain(*large), *into), 400),
        Step("fit", (*fit, "-b", "128", "--memory-limit", "10GiB", "--budget", "150", *into), 400),
    ]


def _is_for_gpu(path: Path) -> bool:
    """Return whether a file may hold tests with the marker; those of kernels get it from a fixture."""
    return path.name.startswith("test_") and (path.parent.name == "kernels" or "mark.gpu" in path.read_text())


def missing() -> list[str]:
    """Return the packages that this Python cannot import, as pip calls them."""
    return [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]


def lay_out(folder: Path) -> None:
    """Make the package as an installation has it, with its entry points beside it."""
    package = folder / "actbench"
    package.mkdir()
    for source in (ROOT / "src" / "actbench").iterdir():
        if source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"actbench-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: actbench\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
    sections = (
        f"[{group}]\n" + "".join(f"{name} = {of}\n" for name, of in each.items()) for group, each in groups.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(sections))


def run(step: Step, seconds: float, environment: dict[str, str], log: Path) -> tuple[str, float]:
    """Run a step, its output to a file and to here; return how it ended and the seconds it took."""
    print(f"\n== {step.name}", flush=True)
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *step.command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(timeout=seconds)
            ended = "ok" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(timeout=20)
            ended = f"stopped after {seconds:.0f} s"
    print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-60:]), flush=True)
    return ended, time.monotonic() - start


def main() -> int:
    """Run all steps and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder for records, tables and logs")
    names = [step.name for step in steps(Path())]
    parser.add_argument(
        "--step", action="append", choices=names, metavar="STEP", help=f"one of {', '.join(names)}; repeat"
    )
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
    logs = results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + BUDGET_SECONDS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        for step in steps(results):
            if asked.step and step.name not in asked.step:
                continue
            seconds = min(step.most_seconds, end - time.monotonic())
            if seconds < 5:
                rows.append((step.name, "not begun, no time left", 0.0))
                continue
            rows.append((step.name, *run(step, seconds, environment, logs / f"{step.name}.log")))
    summary = "".join(f"{name:<16}{taken:>6.0f} s  {ended}\n" for name, ended, taken in rows)
    (results / "summary.txt").write_text(summary)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; records and logs in {results}\n\n{summary}")
    return 0 if all(ended == "ok" for _, ended, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
