"""Estimated training speeds beside published ones.

``.venv/bin/python benchmarks/estimated_time.py > docs/estimated-time.md`` writes the page. The pairs stand in
``published_times.toml``. With numbers as arguments only those pairs are estimated, counted from 0.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.report.tables.values import write

TABLES = tomllib.loads(Path(__file__).with_name("published_times.toml").read_text())

_HEAD = """\
# Estimated and published times

`.venv/bin/python benchmarks/estimated_time.py` prints this page. *fit*: the efficiencies of the cost model were fitted
to the pair; *check*: they were not, but its error was looked at while the structure of the model was changed; *unseen*:
its error was looked at once, after the last change. [time.md](time.md) says how times are estimated, and what is left
out.
"""


def main(chosen: Sequence[int] = ()) -> None:
    """Print the page, or the rows of the chosen pairs."""
    pairs = [TABLES["pair"][place] for place in chosen] or TABLES["pair"]
    if chosen:
        print(*map(row, pairs), sep="\n")
        return
    print(_HEAD)
    print("| Model | Device | Type | Batch | Published/s | Estimated/s | Off by | Use | Source |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | --- | --- |")
    speeds = [speed(pair["case"]) for pair in pairs]
    for pair, found in zip(pairs, speeds, strict=True):
        print(line(pair, found), flush=True)
    print(f"\n{summary(pairs, speeds)}\n")
    print("## Schemes: speed over the exact model's\n")
    print("| Model | Device | Scheme | Batch, exact | Batch | Published | Estimated | Difference | Source |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for ratio in TABLES["ratio"]:
        print(ratio_line(ratio), flush=True)


def ratio_line(ratio: Mapping[str, Any]) -> str:
    """Return the row of a scheme's speed over the exact model's."""
    case = ratio["case"]
    changed = {**case, "batch_size": ratio.get("batch_size", case["batch_size"])}
    found = speed(changed, ratio["scheme"]) / speed(case)
    cells = (
        case["model"],
        case["device_profile"],
        f"`{ratio['scheme']}`",
        str(case["batch_size"]),
        str(changed["batch_size"]),
        f"{ratio['published']:.2f}",
        f"{found:.2f}",
        f"{found - ratio['published']:+.2f}",
        TABLES["sources"][ratio["source"]],
    )
    return f"| {' | '.join(cells)} |"


def speed(case: Mapping[str, Any], scheme: str = "exact") -> float:
    """Return samples a second by estimate."""
    time = measure(Case(**{"scheme": scheme, **case}, meter="simulated")).estimated
    assert time is not None
    return float(case["batch_size"] / time.step_seconds)


def row(pair: Mapping[str, Any]) -> str:
    """Return the row of a pair."""
    return line(pair, speed(pair["case"]))


def line(pair: Mapping[str, Any], found: float) -> str:
    """Return the row of a pair whose estimate is known."""
    case = pair["case"]
    cells = (
        case["model"],
        case["device_profile"],
        _type(case),
        str(case["batch_size"]),
        write(pair["published"], "rate"),
        write(found, "rate"),
        write(found / pair["published"] - 1, "change"),
        pair["use"],
        TABLES["sources"][pair["source"]],
    )
    return f"| {' | '.join(cells)} |"


def _type(case: Mapping[str, Any]) -> str:
    found = f"autocast {case['autocast']}" if "autocast" in case else case.get("dtype", "float32")
    return f"{found}, channels last" if case.get("scheme") == "channels_last" else found


def summary(pairs: Sequence[Mapping[str, Any]], speeds: Sequence[float]) -> str:
    """Return the errors of each use and of all: the geometric mean of the factors by which estimates are off."""
    lines = []
    for use in ("fit", "check", "unseen", "all"):
        off = [
            abs(math.log(found / pair["published"]))
            for pair, found in zip(pairs, speeds, strict=True)
            if use in (pair["use"], "all")
        ]
        if off:
            lines.append(
                f"- {use}: {len(off)} pairs, off by {_percent(_mean(off))} in the geometric mean, "
                f"{_percent(max(off))} at worst"
            )
    return "\n".join(lines)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _percent(logarithm: float) -> str:
    return f"{100 * (math.exp(logarithm) - 1):.1f} %"


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
