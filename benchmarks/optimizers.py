"""Seconds and bytes of a step on the CPU: packed AdamW beside torch's and, where it is installed, torchao's of 8 bits.

The parameters are those of some layers of roberta-base and a part of its embeddings. The steps of all rows take turns,
so that what else the machine does meets all of them. Writes ``optimizers.json`` and ``optimizers.md``.

    .venv/bin/python benchmarks/optimizers.py --layers 3 --words 5000 --rounds 15 --output optimizer-results
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actbench import optim
from actbench.measuring.meters import footprint

WIDTH, HIDDEN = 768, 3072
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Row:
    """What was measured of one optimizer.

    Attributes:
        name: Of the optimizer.
        state_bytes: Per parameter.
        median_seconds: Of a step.
        quartile_seconds: The first and the third.
        fastest_seconds: Of all steps.
        skipped: Why nothing was measured, else empty.
    """

    name: str
    state_bytes: float = 0.0
    median_seconds: float = 0.0
    quartile_seconds: tuple[float, float] = (0.0, 0.0)
    fastest_seconds: float = 0.0
    skipped: str = ""


def shapes(layers: int, words: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of roberta-base's parameters, but for as many layers and words."""
    yield from ((words, WIDTH), (514, WIDTH), (1, WIDTH), (WIDTH,), (WIDTH,))
    for _ in range(layers):
        for _ in range(4):
            yield from ((WIDTH, WIDTH), (WIDTH,))
        yield from ((WIDTH,), (WIDTH,), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,), (WIDTH,), (WIDTH,))


def optimizers() -> dict[str, Make | str]:
    """Return how each optimizer is made, or why it cannot be."""
    rows: dict[str, Make | str] = {
        "torch AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        "torch AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        "torch AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "packed AdamW, smaq": lambda parameters: optim.AdamW(parameters),
        "packed AdamW, int:8,group_size=256": lambda parameters: optim.AdamW(
            parameters, encoding="int:8,group_size=256,rounding=stochastic"
        ),
        "packed AdamW, bf16": lambda parameters: optim.AdamW(parameters, encoding="bf16,rounding=stochastic"),
    }
    try:
        rows["torchao AdamW8bit"] = importlib.import_module("torchao.optim").AdamW8bit
    except ImportError as error:
        rows["torchao AdamW8bit"] = f"pip install torchao: {error}"
    return rows


def measure(layers: int, words: int, rounds: int, only: str) -> tuple[list[Row], int]:
    """Return a row for each optimizer whose name has ``only`` in it, and the number of parameters."""
    sizes = list(shapes(layers, words))
    gradients = [1e-3 * torch.randn(size) for size in sizes]
    rows, running, seconds = {}, {}, {}
    for name, make in optimizers().items():
        if only not in name:
            continue
        if isinstance(make, str):
            rows[name] = Row(name, skipped=make)
            continue
        parameters = [nn.Parameter(0.02 * torch.randn(size)) for size in sizes]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            running[name] = make(parameters)
            running[name].step()  # which makes the state and compiles
            running[name].step()
        except Exception as error:  # whatever other people's code raises is said in its row
            rows[name] = Row(name, skipped=f"{type(error).__name__}: {str(error).splitlines()[0]}")
            running.pop(name, None)
            continue
        seconds[name] = []
    for _ in range(rounds):
        for name, optimizer in running.items():
            started = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - started)
    count = sum(gradient.numel() for gradient in gradients)
    for name, optimizer in running.items():
        rows[name] = _row(name, optimizer, seconds[name], count)
    return list(rows.values()), count


def _row(name: str, optimizer: torch.optim.Optimizer, seconds: list[float], count: int) -> Row:
    first, median, third = statistics.quantiles(seconds, n=4)
    return Row(name, _state_bytes(optimizer) / count, median, (first, third), min(seconds))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all state, also of tensors that are made of others, as torchao's are."""
    plain: list[torch.Tensor] = []
    for tensor in footprint.optimizer_state(optimizer):
        parts: Any = getattr(tensor, "tensor_attrs", None)
        plain += [getattr(tensor, part) for part in parts] if parts else [tensor]
    return footprint.stored_bytes(plain)


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| Optimizer | state, bytes a parameter | step, ms | quartiles | fastest |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row.skipped:
            lines.append(f"| {row.name} | | skipped | {row.skipped} | |")
            continue
        first, third = (f"{1e3 * seconds:.1f}" for seconds in row.quartile_seconds)
        times = f"{1e3 * row.median_seconds:.1f} | {first}-{third} | {1e3 * row.fastest_seconds:.1f}"
        lines.append(f"| {row.name} | {row.state_bytes:.3f} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the table and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=3, help="of roberta-base, 7.1 million parameters each")
    parser.add_argument("--words", type=int, default=5000, help="of its embedding, 768 parameters each")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each optimizer")
    parser.add_argument("--only", default="", help="optimizers whose name has this in it")
    parser.add_argument("--output", type=Path, help="folder for both files")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: quartiles need at least 2")
    torch.manual_seed(0)
    rows, count = measure(given.layers, given.words, given.rounds, given.only)
    print(f"{count} parameters, {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}\n")
    print(table(rows))
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        facts = {"parameters": count, "threads": torch.get_num_threads(), "torch": torch.__version__}
        content = {**facts, "processor": platform.processor() or platform.machine(), "rounds": given.rounds}
        (given.output / "optimizers.json").write_text(
            json.dumps({**content, "rows": [asdict(r) for r in rows]}, indent=1)
        )
        (given.output / "optimizers.md").write_text(table(rows))


if __name__ == "__main__":
    main()
