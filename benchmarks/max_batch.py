"""How long ``actbench sweep --max-batch`` takes as a newcomer types it, and the search of each of its rows.

The goal is 120 s on two quiet cores. Run it with nothing beside it::

    .venv/bin/python benchmarks/max_batch.py results/max-batch.json
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from actbench.machine import provenance

COMMAND = ("sweep", "--max-batch", "--verbose")
_TRIED = re.compile(r"(?P<row>.*): batch (?P<batch>\d+) (?:fits|does not fit)(?: \(after .*\))?")
_MEASURED = re.compile(r"(?:starts|searches): (?P<row>.*)")
_ENDED = re.compile(r"\[\d+/\d+\] (?P<row>.*): (?:peak|failed)")


def rows(lines: Iterable[tuple[float, str]]) -> dict[str, dict[str, Any]]:
    """Return the seconds and trials of each row's search, from lines of progress and the seconds at which they came.

    A search of a simulated row begins with its case, since one process does both.
    """
    found: dict[str, dict[str, Any]] = {}
    begun: dict[str, float] = {}
    for second, line in lines:
        if (start := _MEASURED.fullmatch(line)) is not None:
            begun[start["row"]] = second
            found[start["row"]] = {"tried": []}
        elif (ended := _ENDED.match(line)) is not None and ended["row"] in begun:
            found[ended["row"]]["search_seconds"] = round(second - begun[ended["row"]], 1)
        elif (tried := _TRIED.fullmatch(line)) is not None and tried["row"] in found:
            found[tried["row"]]["tried"].append(int(tried["batch"]))
    return found


def run(command: list[str]) -> dict[str, Any]:
    """Run a command, and return how long it took and what :func:`rows` reads of it."""
    began = time.monotonic()
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            lines.append((time.monotonic() - began, line.rstrip()))
            sys.stderr.write(line)
    return {"wall_seconds": round(time.monotonic() - began, 1), "exit_code": running.returncode, "rows": rows(lines)}


def main() -> None:
    """Run the command in a folder of its own, and write the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file to write, JSON")
    output: Path = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        found = run([sys.executable, "-m", "actbench", *COMMAND, "--output", folder])
    said = {
        name: value if isinstance(value, str) else value.model_dump(mode="json")
        for name, value in provenance(" ".join(("actbench", *COMMAND))).items()
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**said, **found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
