"""How ``actbench run`` agrees with the truth, and how long it takes beside ``actbench measure``.

Each script of tests/script/scripts that is small enough runs for real on the CPU, and simulated with the CPU's profile.
Two scripts train what ``actbench measure`` measures, on a CUDA profile. Times are processor time of the whole command,
in turns, so that what else runs on the machine matters little::

    .venv/bin/python benchmarks/script_agreement.py results/run/agreement.md
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "script"))

from cases import CASES, SCRIPTS  # noqa: E402 - beside the tests that hold these figures
from pairs import BATCH, COMPARED, MORE, NANOGPT, PLAIN  # noqa: E402

from actbench.results.machine import provenance  # noqa: E402

PROFILE = "rtx-4090"
ROUNDS = 3

REASONS = {
    "dpo": "oneDNN's buffers for small products in bfloat16, which nobody knows",
    "whisper": "oneDNN's buffers for small products in bfloat16, which nobody knows",
    "gan": "the state of a generator, 5,056 bytes, is no tensor of an operator",
}
"""What is not equal, where it is known, by the name of a script."""


@dataclass(frozen=True)
class Ran:
    """A command that ran: its peak in bytes, and its processor time in seconds, children included."""

    peak_bytes: int
    seconds: float


def ran(words: Sequence[str], folder: Path, more: dict[str, str] | None = None) -> Ran:
    """Run actbench in a folder."""
    file = folder / "found.json"
    command = [sys.executable, "-m", "actbench", words[0], "--export-json", str(file), *words[1:]]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    alone = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}  # each thread of an operator has buffers of its own
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=alone)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: list[dict[str, Any]] = json.loads(file.read_text())
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ran(found[0]["outcome"]["peak_bytes"], seconds)


def on_the_cpu(folder: Path) -> Iterator[str]:
    """Yield the rows of scripts that run for real and simulated."""
    for case in (each for each in CASES if each.name in COMPARED):
        words = [*case.command("tiny", {}), *MORE.get(case.name, "").split()]
        more = dict(case.environment("tiny"))
        real = ran(["run", "--meter", "cpu", "--quiet", *words], folder, more)
        simulated = ran(["run", "--device-profile", "cpu", "--quiet", *words], folder, more)
        difference = simulated.peak_bytes / real.peak_bytes - 1
        reason = REASONS.get(case.name, "") if simulated.peak_bytes != real.peak_bytes else ""
        yield f"| {case.name} | {real.peak_bytes:,} | {simulated.peak_bytes:,} | {difference:+.3%} | {reason} |"


def beside_measure(folder: Path) -> Iterator[str]:
    """Yield the rows of scripts that ``actbench measure`` can express."""
    plain = folder / "plain.py"
    plain.write_text(PLAIN)
    scripts = {"plain": [str(plain)], "nanogpt": [str(SCRIPTS / "nanogpt.py"), *NANOGPT.split()]}
    reasons = {"plain": "", "nanogpt": "GradScaler's scale and growth, the scaled loss and the infinities found"}
    for name, words in scripts.items():
        function = f"{ROOT / 'tests' / 'script' / 'pairs.py'}:{name}"
        autocast = [] if name == "plain" else ["--autocast", "fp16"]
        common = ["--device-profile", PROFILE]
        ratios = []
        for _ in range(ROUNDS):
            measured = ran(
                ["measure", function, "--batch-size", str(BATCH), *autocast, "--meter", "simulated", *common], folder
            )
            simulated = ran(["run", "--quiet", *common, *words], folder)
            ratios.append(simulated.seconds / measured.seconds)
        more = simulated.peak_bytes - measured.peak_bytes
        ratio = statistics.median(ratios)
        peaks = f"{measured.peak_bytes:,} | {simulated.peak_bytes:,} | {more:+,}"
        yield f"| {name} | {peaks} | {reasons[name]} | {ratio:.2f} |"


def main() -> None:
    """Run everything, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the page to write, Markdown")
    output: Path = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        real, beside = list(on_the_cpu(folder)), list(beside_measure(folder))
        large = [ran(["run", "--quiet", "--device-profile", PROFILE, str(SCRIPTS / "llama_peft.py")], folder)]
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
        *beside,
        "",
        f"`actbench run llama_peft.py`, an 8B model with LoRA: {large[0].seconds:.1f} s of processor time.",
        "",
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
