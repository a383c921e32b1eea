"""What packing costs the host: microseconds beyond the exact step for each site, forward and backward.

Tensors are so small that kernels compute next to nothing, though calling them counts. The exact and the converted model
take turns, and the lower quartile of the processor time of one thread is compared, so that what else the machine does
disturbs little. The launch of a CUDA kernel is timed with a driver that does nothing. With --output the figures are
kept in OUTPUT/host.json under the label, and OUTPUT/host.md shows all labels, one below the other::

    .venv/bin/python benchmarks/host.py
    .venv/bin/python benchmarks/host.py --case linear --rounds 40
    .venv/bin/python benchmarks/host.py --output results/host --label after
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import actbench
from actbench.machine import provenance
from actbench.methods.actnn.ops import groupquant
from actbench.model.data import Data
from actbench.ops import rawkernel

WARM_UP_STEPS = 8
LAUNCH = "launch of a kernel"
"""The row of the stubbed launch."""


@dataclass(frozen=True)
class Case:
    """A stack of equal layers under a scheme.

    Attributes:
        layer: Makes one layer.
        shape: The shape of its input and output.
        scheme: The specification of the scheme.
        layers: How many layers are stacked; each is a site.
    """

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    scheme: str
    layers: int = 40


IMAGES = (2, 8, 8, 8)
CASES = {
    "linear": Case(lambda: nn.Linear(32, 32), (64, 32), "actnn:L2"),
    "convolution": Case(lambda: nn.Conv2d(8, 8, 3, padding=1), IMAGES, "actnn:L2", 20),
    "batch norm": Case(lambda: nn.BatchNorm2d(8), IMAGES, "actnn:L2", 20),
    "relu": Case(nn.ReLU, IMAGES, "actnn:L2"),
    "gact hook": Case(lambda: nn.Linear(32, 32), (64, 32), "gact:L2"),
    "few-bit GELU": Case(nn.GELU, (8, 64), "fewbit:3"),
    "randomized": Case(lambda: nn.Linear(32, 32), (64, 32), "randomized:0.2"),
}


@dataclass(frozen=True)
class Row:
    """Microseconds beyond the exact layer, and operators, for each site.

    Attributes:
        forward_us: Of the forward pass.
        backward_us: Of the backward pass; 0 for the launch.
        own_operators: Operators of this package.
        more_operators: Operators of torch, beyond the exact layer's.
    """

    case: str
    forward_us: float
    backward_us: float = 0.0
    own_operators: float = 0.0
    more_operators: float = 0.0


Subject = tuple[nn.Module, Tensor]


def subject_of(case: Case, *, convert: bool) -> Subject:
    """Return the stack of layers and its input."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(case.layer() for _ in range(case.layers)))
    if convert:
        model = actbench.convert(model, case.scheme)
    return model, torch.randn(case.shape, requires_grad=True)


def seconds_of(subject: Subject) -> tuple[float, float]:
    """Run a step and return the processor time of its forward and its backward pass."""
    model, x = subject
    start = time.process_time()
    loss = model(x).sum()
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    for parameter in model.parameters():
        parameter.grad = None
    return middle - start, end - middle


class Counting(TorchDispatchMode):
    """Counts the operators of a step: of this package, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run an operator."""
        if func.namespace == "actbench":
            self.own += 1
        else:
            self.others += 1
        return func(*args, **(kwargs or {}))


def operators_of(subject: Subject) -> Counting:
    """Return the operators of a step, counted."""
    with Counting() as counted:
        seconds_of(subject)
    return counted


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of the values is below."""
    return sorted(values)[len(values) // 4]


def measured(name: str, case: Case, rounds: int) -> Row:
    """Measure a case, its two models in turns."""
    subjects = subject_of(case, convert=False), subject_of(case, convert=True)
    for subject in subjects * WARM_UP_STEPS:
        seconds_of(subject)
    runs = [[seconds_of(subject) for subject in subjects] for _ in range(rounds)]
    beyond = []
    for direction in (0, 1):
        exact, packing = (lower_quartile([run[which][direction] for run in runs]) for which in (0, 1))
        beyond.append(1e6 * (packing - exact) / case.layers)
    exactly, packed = map(operators_of, subjects)
    counts = packed.own / case.layers, (packed.others - exactly.others) / case.layers
    return Row(name, *beyond, *counts)


def stub_driver() -> None:
    """Let launches find a kernel that is compiled and a driver that does nothing; for the rest of the process."""
    nothing = ctypes.CDLL(None)["ffs"]  # a function of the C library that looks at its first argument alone
    driver: Any = types.SimpleNamespace(cuLaunchKernel=nothing)
    cuda = types.SimpleNamespace(_cuda_getDevice=lambda: -1, _cuda_getCurrentRawStream=lambda _: 0)
    rawkernel._driver, rawkernel._torch = lambda: driver, cuda  # type: ignore[assignment]
    rawkernel._most_blocks = lambda _: 4224  # type: ignore[assignment]
    cupy: Any = types.ModuleType("cupy")
    kernel = types.SimpleNamespace(compile=lambda: None, kernel=types.SimpleNamespace(ptr=0))
    cupy.RawModule = lambda **_: types.SimpleNamespace(get_function=lambda _: kernel)
    errors = types.SimpleNamespace(CompileException=Exception, CUDARuntimeError=Exception)
    cupy.cuda = types.SimpleNamespace(compiler=errors, runtime=errors)
    sys.modules["cupy"] = cupy
    torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[misc,assignment]


def measured_launch(rounds: int) -> Row:
    """Measure the launch of the kernel that encodes groups, with a driver that does nothing."""
    stub_driver()
    x, seed = torch.randn(4096), torch.tensor(5)
    codes, words = groupquant.encode(x, 2, 256, seed)
    times, count = [], 1000
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(count):
            groupquant.launch_encode(codes, words, x, 2, 256, seed, True)
        times.append(1e6 * (time.process_time() - start) / count)
    return Row(LAUNCH, lower_quartile(times))


def table_of(runs: dict[str, Any]) -> str:
    """Return a table with a row for each label, and a column for each case: microseconds, and operators."""
    heads = ["Turn", *(f"{name}, `{case.scheme}`" for name, case in CASES.items()), f"{LAUNCH}, driver stubbed"]
    lines = [heads, ["---", *("---:" for _ in heads[1:])]]
    for label, run in runs.items():
        rows = {each["case"]: Row(**each) for each in run["rows"]}
        lines.append([label, *(_cell(rows.get(name)) for name in (*CASES, LAUNCH))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.case == LAUNCH:
        return f"{row.forward_us:.1f}"
    times = f"{row.forward_us + row.backward_us:.0f} ({row.forward_us:.0f} + {row.backward_us:.0f})"
    return f"{times}; {row.own_operators:.1f}, {row.more_operators:+.1f}"


ABOUT = """# What packing costs the host

Microseconds of processor time beyond the exact layer for each site: both passes (forward + backward); then operators of
actbench, and torch's beyond the exact layer's. Turns are comparable with their neighbours of the same name.

"""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CASES, LAUNCH]
    parser.add_argument(
        "--case", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--rounds", type=int, default=30, help="steps of each model (default 30)")
    parser.add_argument("--label", default="now", help="the name of the row (default now)")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="keep the figures in FOLDER/host.json and host.md"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in asked.case:
        print(name, file=sys.stderr, flush=True)
        rows.append(
            asdict(measured_launch(asked.rounds) if name == LAUNCH else measured(name, CASES[name], asked.rounds))
        )
    origin = provenance("benchmarks/host.py")
    told = {key: value.model_dump(mode="json") if isinstance(value, Data) else value for key, value in origin.items()}
    run = {asked.label: {**told, "rows": rows}}
    if asked.output is not None:
        path = asked.output / "host.json"
        run = (json.loads(path.read_text()) if path.exists() else {}) | run
        asked.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run, indent=1) + "\n")
        (asked.output / "host.md").write_text(ABOUT + table_of(run))
    print(table_of(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
