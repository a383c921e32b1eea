"""How long steps take that are captured as a CUDA graph: the device's part alone, beside steps that the host launches.

Steps of all rows take turns, each round in the opposite order of the one before. Prints a Markdown table; with --output
the seconds of every step go to OUTPUT as JSON::

    python benchmarks/captured.py --output captured.json resnet50 128 exact actnn:L2
"""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torchvision
from pydantic_core import to_json
from torch import nn

import actbench
from actbench.machine import machine, now, versions

WARM_UP_STEPS = 4


def train_step(module: nn.Module, batch_size: int) -> Callable[[], None]:
    """Return a step of SGD with momentum on one batch of random images."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)
    images = torch.randn(batch_size, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (batch_size,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()

    with torch.cuda.stream(torch.cuda.Stream()):  # what a capture asks for: states of optimizers, workspaces, plans
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.synchronize()
    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds_of(step: Callable[[], None]) -> float:
    """Run a step between two events of the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def main() -> int:
    """Time the steps and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name of torchvision's")
    parser.add_argument("batch_size", type=int)
    parser.add_argument("schemes", nargs="+", metavar="scheme")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    exact = torchvision.models.get_model(asked.model).cuda()
    steps: dict[str, Callable[[], None]] = {}
    for spec in asked.schemes:
        module = copy.deepcopy(exact)
        step = train_step(module if spec == "exact" else actbench.convert(module, spec), asked.batch_size)
        steps[spec] = step
        steps[f"{spec}, captured"] = captured(step)
    runs: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(asked.rounds):
        for name in list(steps) if number % 2 else reversed(list(steps)):
            runs[name].append(seconds_of(steps[name]))
    print("| Step | Median | Speed beside the first row's |\n| --- | ---: | ---: |")
    first = median(runs[next(iter(runs))])
    for name, seconds in runs.items():
        print(f"| {name} | {1000 * median(seconds):.1f} ms | {first / median(seconds):.2f}x |")
    if asked.output:
        origin = {"command": shlex.join(sys.argv), "machine": machine(), "versions": versions(), "recorded_at": now()}
        asked.output.write_bytes(to_json({**origin, "seconds": runs}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
