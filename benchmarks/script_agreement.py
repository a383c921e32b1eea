"""How ``actbench run`` agrees with the truth, and how long it takes beside ``actbench measure``.

Each script of tests/tools/script/scripts that is small enough runs for real on the CPU, and simulated with the CPU's
profile. Two scripts train what ``actbench measure`` measures, on a CUDA profile. Times are processor time of the whole
command, in turns, so that what else runs on the machine matters little::

    .venv/bin/python benchmarks/script_agreement.py results/run/agreement.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "tools" / "script"))

import torch  # noqa: E402
from cases import CASES, SCRIPTS, ScriptCase  # noqa: E402 - beside the tests that hold these figures
from pairs import BATCH, COMPARED, MORE, NANOGPT, PLAIN  # noqa: E402

from actbench.machine import provenance  # noqa: E402
from actbench.model.meters import MeterName  # noqa: E402
from actbench.model.records import Case  # noqa: E402
from actbench.model.scripts import Script  # noqa: E402
from actbench.tools.script.bench import Session  # noqa: E402

PROFILE = "rtx-4090"
ROUNDS = 3

_ENVIRONMENT = dict(os.environ)  # before small scripts get their sizes by it
_ALONE = {"OMP_NUM_THREADS": "1"}  # each thread of an operator has buffers of its own

REASONS = {
    "gan": "the state of a generator, 5,056 bytes, is no tensor of an operator",
}
"""What is not equal, where it is known, by the name of a script."""

BY_MODEL = {
    "llama_peft": "the script holds one micro-batch at a time, measure the whole batch",
    "trainer": "scalars of the step before: four blocks in all",
}
"""Scripts that train a model that actbench ships, and what is not equal."""


@dataclass(frozen=True)
class Ran:
    """A command that ran: the peak of its last row, and its seconds: processor time with children, and in all."""

    peak_bytes: int
    seconds: float
    wall_seconds: float


def ran(words: Sequence[str], folder: Path) -> Ran:
    """Run actbench in a folder."""
    file = folder / "found.json"
    command = [sys.executable, "-m", "actbench", words[0], "--export-json", str(file), *words[1:]]
    began = time.monotonic()
    started = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, env={**_ENVIRONMENT, **_ALONE})
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    if started.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {started.returncode}")
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return Ran(found[-1]["outcome"]["peak_bytes"], used.ru_utime + used.ru_stime, time.monotonic() - began)


def peak(case: ScriptCase, meter: MeterName) -> int:
    """Run a script in a process that is forked from this one, which has imported torch, and return its peak."""
    target, *arguments = [*case.command("tiny", {}), *MORE.get(case.name, "").split()]
    script = Script(target=target, arguments=tuple(arguments))
    profile = "cpu" if meter == "simulated" else None
    session = Session(Case(model=script.text, batch_size=1, meter=meter, device_profile=profile, script=script))
    return session.memory().peak_bytes


def on_the_cpu() -> Iterator[str]:
    """Yield the rows of scripts that run for real and simulated, in the current folder."""
    for case in (each for each in CASES if each.name in COMPARED):
        os.environ.update(case.environment("tiny"))
        real, simulated = peak(case, "cpu"), peak(case, "simulated")
        reason = REASONS.get(case.name, "") if simulated != real else ""
        yield f"| {case.name} | {real:,} | {simulated:,} | {simulated / real - 1:+.3%} | {reason} |"


@dataclass(frozen=True)
class Compared:
    """A script, and the arguments of ``actbench measure`` that train the same; ``reason`` says what is not equal."""

    name: str
    script: Sequence[str]
    measured: Sequence[str]
    reason: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether both commands run one row: beside a scheme, measure also runs the exact model."""
        return "--scheme" not in self.measured


def compared(folder: Path) -> Iterator[Compared]:
    """Yield the scripts that ``actbench measure`` can express."""
    plain = folder / "plain.py"
    plain.write_text(PLAIN)
    pairs = str(ROOT / "tests" / "tools" / "script" / "pairs.py")
    batch = ("--batch-size", str(BATCH))
    yield Compared("plain", [str(plain)], [f"{pairs}:plain", *batch])
    yield Compared(
        "nanogpt",
        [str(SCRIPTS / "nanogpt.py"), *NANOGPT.split()],
        [f"{pairs}:nanogpt", *batch, "--autocast", "fp16"],
        "scalars of GradScaler and of the step before: four blocks in all",
    )
    for name, reason in BY_MODEL.items():
        case = next(each for each in CASES if each.name == name)
        yield Compared(name, case.command("real", {}), case.measured_as.split(), reason)


def beside_measure(folder: Path) -> Iterator[str]:
    """Yield the rows of scripts that ``actbench measure`` can express."""
    for each in compared(folder):
        common = ["--device-profile", PROFILE]
        ratios = []
        for _ in range(ROUNDS if each.is_timed else 1):
            measured = ran(["measure", *each.measured, "--meter", "simulated", *common], folder)
            simulated = ran(["run", "--quiet", *common, *each.script], folder)
            ratios.append(simulated.seconds / measured.seconds)
        more = simulated.peak_bytes - measured.peak_bytes
        ratio = f"{statistics.median(ratios):.2f}" if each.is_timed else "–"
        peaks = f"{measured.peak_bytes:,} | {simulated.peak_bytes:,} | {more:+,}"
        yield f"| {each.name} | {peaks} | {each.reason} | {ratio} |"


def main() -> None:
    """Run everything, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the page to write, Markdown")
    output: Path = parser.parse_args().output
    torch.set_num_threads(1)
    output = output.resolve()
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory() as other,
        ThreadPoolExecutor() as waiting,
        contextlib.chdir(name),
    ):
        beside = waiting.submit(lambda: list(beside_measure(Path(other))))
        real = list(on_the_cpu())
        beside.result()
        large = ran(["run", "--quiet", "--device-profile", PROFILE, str(SCRIPTS / "llama_peft.py")], Path(other))
    said = provenance("benchmarks/script_agreement.py")
    versions: Any = said["versions"]
    lines = [
        "# Scripts against the truth",
        "",
        f"Made by `benchmarks/script_agreement.py` with torch {versions.torch}.",
        "",
        "Peaks of small scripts in bytes: run for real on a CPU (`actbench run --meter cpu`), and simulated with the",
        "profile of a CPU. One thread computes: each thread of an operator has buffers of its own.",
        "",
        "| script | real | simulated | difference | reason |",
        "| --- | ---: | ---: | ---: | --- |",
        *real,
        "",
        f"Peaks of scripts on a {PROFILE} in bytes, and of `actbench measure` of the same model, batch, loss and",
        "optimizer; the processor time of `actbench run` over that of `actbench measure`, each the whole command.",
        "",
        "| script | measure | run | more | reason | time |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
        *beside.result(),
        "",
        (
            f"`actbench run llama_peft.py`, an 8B model with LoRA, from start to end: {large.wall_seconds:.1f} s, "
            f"{large.seconds:.1f} s of processor time."
        ),
        "",
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
