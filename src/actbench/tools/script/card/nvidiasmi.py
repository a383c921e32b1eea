"""The command ``nvidia-smi`` of a simulated card, as far as scripts ask it; its first argument is a file of answers.

It is a program of its own, which imports nothing of actbench: a script may ask for it in every step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

_UNITS = {
    **dict.fromkeys(("memory.total", "memory.used", "memory.free", "memory.reserved", "used_gpu_memory"), "MiB"),
    **dict.fromkeys(("utilization.gpu", "utilization.memory"), "%"),
    "power.draw": "W",
    "clocks.sm": "MHz",
}
_UNKNOWN = "[N/A]"
_ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "used_memory": "used_gpu_memory",
}
_REFUSED = (
    "nvidia-smi of a simulated card answers without options, and -L, --query-gpu=… and --query-compute-apps=… with "
    "--format=csv; it was asked for: {}"
)


def main(arguments: list[str]) -> int:
    """Print the answer to what ``nvidia-smi`` is asked, and return the exit status."""
    with open(arguments[0], encoding="utf-8") as file:
        told = json.load(file)
    parser = argparse.ArgumentParser(prog="nvidia-smi", allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("-i", "--id")
    parser.add_argument("--query-gpu")
    parser.add_argument("--query-compute-apps")
    parser.add_argument("--format", default="csv")
    asked, others = parser.parse_known_args(arguments[1:])
    if others:
        print(_REFUSED.format(" ".join(others)), file=sys.stderr)
        return 2
    wanted = None if asked.id is None else asked.id.split(",")
    cards = [each for each in told["cards"] if wanted is None or {str(each["index"]), each["uuid"]} & {*wanted}]
    if not cards:
        print(f"No devices were found for -i {asked.id}")
        return 6
    if asked.list_gpus:
        print(*(f"GPU {each['index']}: {each['name']} (UUID: {each['uuid']})" for each in cards), sep="\n")
    elif asked.query_gpu is not None:
        rows = [{**told["machine"], **each} for each in cards]
        _print_csv(asked.query_gpu, rows, asked.format)
    elif asked.query_compute_apps is not None:
        _print_csv(asked.query_compute_apps, told["processes"], asked.format)
    else:
        _print_summary(told, cards)
    return 0


def _print_csv(query: str, rows: list[dict[str, Any]], form: str) -> None:
    names = [_ALIASES.get(name.strip(), name.strip()) for name in query.split(",")]
    units, options = [_UNITS.get(name, "") for name in names], form.split(",")
    if "noheader" not in options:
        print(", ".join(f"{name} [{unit}]" if unit else name for name, unit in zip(names, units, strict=True)))
    for row in rows:
        values = [row.get(name, _UNKNOWN) for name in names]
        written = [
            f"{value} {unit}" if unit and "nounits" not in options and value != _UNKNOWN else str(value)
            for value, unit in zip(values, units, strict=True)
        ]
        print(", ".join(written))


def _print_summary(told: dict[str, Any], cards: list[dict[str, Any]]) -> None:
    machine, line = told["machine"], "+" + "-" * 89 + "+"
    driver = machine["driver_version"]
    rows = [f"NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {machine['cuda_version']}"]
    rows += ["GPU  Name | Memory-Usage | GPU-Util"]
    rows += [
        f"{each['index']:>3}  {each['name']} | {each['memory.used']}MiB / {each['memory.total']}MiB | "
        f"{each['utilization.gpu']}%"
        for each in cards
    ]
    rows += ["Processes: GPU  PID  Process name  GPU Memory"]
    rows += [
        f"{each['index']}  {each['pid']}  {each['process_name']}  {each['used_gpu_memory']}MiB"
        for each in told["processes"]
    ]
    print(time.strftime("%a %b %d %H:%M:%S %Y"))
    print(line)
    for row in rows:
        print(f"| {row:<87} |")
        print(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
