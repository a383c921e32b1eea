"""How long ``actbench report`` takes, and how much memory, for a results file of many rows.

Writes a file of measured and simulated rows of made-up amounts, reports it with its output in a pipe, and prints the
seconds of CPU and the peak of resident memory of that process. The figures of docs/columns.md::

    .venv/bin/python benchmarks/report_rows.py 100000
    .venv/bin/python benchmarks/report_rows.py 100000 --schemes 4000 --sites 12
    .venv/bin/python benchmarks/report_rows.py 100000 -- --export-csv table.csv
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.meters import MeterName
from actbench.model.provenance import Machine, Versions
from actbench.model.records import Built, Case, Site

METERS: tuple[MeterName, ...] = ("cpu", "simulated")
MODELS = ("roberta-base", "bert-base-uncased", "gpt2", "vit-base", "tiny-llama")

_REPORT = """
import atexit, sys
from pathlib import Path
from actbench.cli import main

lines = lambda: Path("/proc/self/status").read_text().splitlines()
atexit.register(lambda: print(next(line for line in lines() if line.startswith("VmHWM")), file=sys.stderr))
main()
"""  # the peak that a parent is told of a process is at least that of the parent itself, which started as a copy


def main() -> None:
    """Write the rows that were asked for and report them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, help="rows of the file")
    parser.add_argument("--schemes", type=int, default=50, help="schemes that are compared with one exact row")
    parser.add_argument("--sites", type=int, default=0, help="places that a row says were converted")
    parser.add_argument("--keep", type=Path, help="leave the file here")
    parser.add_argument("flags", nargs="*", help="flags of actbench report, after --")
    asked = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        file = asked.keep or Path(folder) / "rows.jsonl"
        with file.open("w") as out:
            for record in records(asked.rows, asked.schemes, asked.sites):
                out.write(record.model_dump_json() + "\n")
        print(f"{asked.rows:,} rows, {file.stat().st_size / 2**20:.0f} MiB")
        seconds, peak_bytes = report(file, *asked.flags)
    print(f"{seconds:.1f} s of CPU, {peak_bytes / 1e6:.0f} MB at the peak")


def records(rows: int, schemes: int = 50, sites: int = 0) -> Iterator[MeasuredRecord]:
    """Yield records as a sweep over models, batches, schemes and two meters leaves them.

    Args:
        rows: How many.
        schemes: How many of them share a group, the exact one among them.
        sites: How many places each names.
    """
    machine = Machine(name="box", system="Linux", processor="a processor", cores=2, memory_bytes=8 * 1024**3)
    versions = Versions(actbench="0.1.0", python="3.11.7", torch="2.11.0", transformers="5.17.0", commit="0" * 40)
    for number in range(rows):
        group, place = divmod(number, len(METERS) * schemes)
        batch, model = divmod(group, len(MODELS))
        scheme, meter = divmod(place, len(METERS))
        yield MeasuredRecord(
            recipe="made",
            case=Case(
                model=MODELS[model],
                scheme=f"randomized:0.{scheme:05d}" if scheme else "exact",
                batch_size=batch + 1,
                sequence_length=128,
                meter=METERS[meter],
                device_profile="cpu" if METERS[meter] == "simulated" else None,
            ),
            outcome=_measured(number, METERS[meter], batch + 1, sites),
            machine=machine,
            versions=versions,
            command="actbench sweep made.toml --meter cpu,simulated --output results",
            recorded_at=f"2026-01-02T03:{number // 60 % 60:02d}:{number % 60:02d}+00:00",
        )


def _measured(number: int, meter: MeterName, batch_size: int, sites: int) -> Measurement:
    chance = random.Random(number)
    is_timed = meter == "cpu"
    return Measurement(
        weights_bytes=498597624,
        gradients_bytes=498588680,
        optimizer_bytes=997177360,
        activation_bytes=chance.randrange(10**8, 10**10),
        peak_bytes=chance.randrange(10**9, 10**11),
        step_seconds=tuple(chance.uniform(0.1, 10.0) for _ in range(10)) if is_timed else None,
        timing_round="first" if is_timed else None,
        gradient_error=chance.random(),
        gradient_cosine=chance.random(),
        dtype="float32",
        optimizer="AdamW",
        built=Built(model_class="RobertaForMaskedLM", task="masked-lm", sequence_length=128),
        sites=tuple(
            Site(
                path=f"roberta.encoder.layer.{layer}.intermediate.dense",
                was="nn.Linear",
                becomes="randomized",
                bytes_before=1572864 * batch_size,
                bytes_after=1572864 * batch_size // 8 + number % 100,
                calls=1,
            )
            for layer in range(sites)
        ),
    )


def report(file: Path, *flags: str, cpu_seconds: int | None = None) -> tuple[float, int]:
    """Report a file in a process of its own, with its output in a pipe.

    Args:
        file: The results file.
        flags: Flags of the command.
        cpu_seconds: How much of a processor's time it may take; None is without end.

    Returns:
        Its seconds of CPU and its peak of resident bytes.
    """
    command = [sys.executable, "-c", _REPORT, "report", str(file), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if cpu_seconds is not None:
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        while process.stdout.read(2**20):
            pass
        told = process.stderr.read().decode()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{told}actbench report ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime, int(told.split()[-2]) * 1024


if __name__ == "__main__":
    main()
