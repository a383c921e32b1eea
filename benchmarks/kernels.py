"""How fast the operators are, beside a copy, the exact operator and the reference in plain torch.

All calls of a row take turns, each round in the opposite order of the one before, and a copy of other tensors runs
before each call, so that no call finds its own data in the caches. Prints Markdown tables; with --output they are
written to OUTPUT/kernels/MACHINE.kernels.md after each row, and the seconds of every run to the .json beside it::

    .venv/bin/python benchmarks/kernels.py --operator layer --bits 2 3 4 --size 4096x3072
    .venv/bin/python benchmarks/kernels.py --reference --rounds 9 --size 4096x3072 --output results
"""

from __future__ import annotations

import argparse
import gc
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from pydantic_core import to_json
from torch import Tensor, nn

from actbench.errors import first_line
from actbench.machine import machine, now, versions
from actbench.methods.actnn.ops import batchnorm, groupquant
from actbench.methods.actnn.ops.batchnorm import reference as norm
from actbench.methods.actnn.ops.groupquant import reference as grouped
from actbench.methods.fewbit import piecewise
from actbench.methods.fewbit.activations import function_of
from actbench.methods.fewbit.ops import mask, stepwise
from actbench.methods.fewbit.ops.activate import activate, agrees_on_cuda, reference as activate_reference
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.methods.fewbit.tables import table
from actbench.methods.formats.ops import smaq, smaqstep
from actbench.methods.formats.ops.smaq import reference as smaq_reference
from actbench.methods.formats.ops.smaq.format import SMAQ
from actbench.methods.formats.ops.smaqstep.rules import adam_rule, sgd_rule
from actbench.methods.randomized.ops import halves, matrix as sketch
from actbench.ops import bitpack
from actbench.ops.bitpack import packed_bytes
from actbench.tools.calibrate.stopwatch import settle_heap
from actbench.units import format_seconds

Call = Callable[[], object]
FAMILIES = {
    "layer": ("layer:gelu", "layer:silu", "layer:relu"),
    "activate": ("stepwise_activate",),
    "stepwise": ("stepwise_encode", "stepwise_decode"),
    "mask": ("relu_mask", "mask_select"),
    "bitpack": ("pack_codes", "unpack_codes"),
    "groupquant": ("groupquant_encode", "groupquant_decode"),
    "batchnorm": ("batchnorm_backward",),
    "smaq": ("smaq_encode", "smaq_decode"),
    "smaqstep": ("smaqstep_adam", "smaqstep_sgd"),
    "sketch": ("sketch_rademacher", "sketch_gaussian", "sketch_halves"),
}
"""The operators by family, in the order of the table. ``layer:`` is forward and backward of a converted layer."""

OPERATORS = tuple(name for names in FAMILIES.values() for name in names)
ONE_WIDTH = {"layer:relu", *(name for each in ("mask", "smaq", "smaqstep", "sketch") for name in FAMILIES[each])}
"""Operators without a choice of bits."""

FLOATS = ("float32", "bfloat16", "float16")
SIZES = {"cpu": [(512, 3072), (4096, 3072)], "cuda": [(4096, 4096), (16384, 4096)]}
GROUP_SIZE = 256
WARM_UP_ROUNDS = 3
OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


@dataclass(frozen=True)
class Place:
    """The tensor that an operator works on, and the bits of a code."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device
    bits: int

    @property
    def count(self) -> int:
        """Elements of the tensor."""
        return self.rows * self.columns

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return self.count * self.dtype.itemsize

    def normal(self, seed: int) -> Tensor:
        """Return a standard normal tensor."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(self.rows, self.columns, dtype=self.dtype, device=self.device, generator=generator)


@dataclass(frozen=True)
class Subject:
    """An operator that is ready to run.

    Attributes:
        call: Runs it once.
        moved_bytes: Bytes that it reads and writes, by count.
        reference: Does the same in plain torch.
        exact: Runs the operator that it replaces.
        compilable: A layer, and a function that makes a call of it.
    """

    call: Call
    moved_bytes: int
    reference: Call | None = None
    exact: Call | None = None
    compilable: tuple[nn.Module, Callable[[nn.Module], Call]] | None = None


def in_one_pass(function: str, place: Place) -> bool:
    """Return whether a function and its codes take one pass: on CUDA, if the kernel has torch's bits."""
    return place.device.type == "cuda" and agrees_on_cuda(function, place.dtype, place.device)


def layer(exact: nn.Module, place: Place) -> Subject:
    """Return forward and backward of a converted layer."""
    name, x, grad = type(exact).__name__, place.normal(1).requires_grad_(), place.normal(2)
    steps = piecewise.relu() if name == "ReLU" else table(function_of(exact), place.bits)
    ours = StepwiseActivation(exact, steps, name, x.detach())
    again = 0 if name == "ReLU" or in_one_pass(name.lower(), place) else place.bytes

    def step(module: nn.Module) -> Call:
        return lambda: torch.autograd.grad(module(x), x, grad)

    moved = 4 * place.bytes + 2 * packed_bytes(place.count, ours.steps.bits) + again
    return Subject(step(ours), moved, None, step(exact), (exact, step))


def of_steps(name: str, place: Place) -> Subject:
    """Return an operator of few-bit activations, with the table of GELU."""
    x, grad, bits, found = place.normal(1), place.normal(2), place.bits, table(function_of(nn.GELU()), place.bits)
    bounds, levels = (torch.tensor(values, device=place.device) for values in (found.borders, found.levels))
    codes = packed_bytes(place.count, bits)
    if name == "stepwise_activate":
        moved = (2 if in_one_pass("gelu", place) else 3) * place.bytes + codes
        ours, reference = (partial(each, x, "gelu", bounds, bits, False) for each in (activate, activate_reference))
        return Subject(ours, moved, reference, lambda: nn.functional.gelu(x))
    if name == "stepwise_encode":
        ours, reference = (
            partial(each, x, bounds, bits, False) for each in (stepwise.encode, stepwise.encode_reference)
        )
        return Subject(ours, place.bytes + codes, reference)
    packed = stepwise.encode(x, bounds, bits, False)
    ours, reference = (
        partial(each, packed, levels, grad, bits) for each in (stepwise.decode, stepwise.decode_reference)
    )
    return Subject(ours, 2 * place.bytes + codes, reference)


def of_mask(name: str, place: Place) -> Subject:
    """Return ReLU with its mask, or the gradient by it."""
    x, grad, moved = place.normal(1), place.normal(2), 2 * place.bytes + packed_bytes(place.count, 1)
    if name == "relu_mask":
        return Subject(lambda: mask.relu(x), moved, lambda: mask.relu_reference(x), lambda: torch.relu(x))
    _, bits = mask.relu(x)
    exact = partial(torch.ops.aten.threshold_backward, grad, x, 0)
    return Subject(lambda: mask.select(bits, grad), moved, lambda: mask.select_reference(bits, grad), exact)


def of_codes(name: str, place: Place) -> Subject:
    """Return packing or unpacking of codes in bytes."""
    codes = torch.randint(2**place.bits, (place.count,), dtype=torch.uint8, device=place.device)
    moved = place.count + packed_bytes(place.count, place.bits)
    if name == "pack_codes":
        return Subject(lambda: bitpack.pack_codes(codes, place.bits), moved, lambda: bitpack.pack(codes, place.bits))
    given = bitpack.pack_codes(codes, place.bits), place.bits, place.count
    return Subject(lambda: bitpack.unpack_codes(*given), moved, lambda: bitpack.unpack(*given).byte())


def of_groups(name: str, place: Place) -> Subject:
    """Return coding or decoding in groups."""
    x, seed, sizes = place.normal(1).view(-1), torch.tensor(1, device=place.device), (place.bits, GROUP_SIZE)
    moved = place.bytes + groupquant.packed_bytes(place.count, *sizes)
    if name == "groupquant_encode":
        ours, reference = partial(groupquant.encode, x, *sizes, seed), partial(grouped.encode, x, *sizes, seed, True)
        return Subject(ours, moved, reference)
    given = x, *groupquant.encode(x, *sizes, seed), *sizes, 0
    return Subject(partial(groupquant.decode_, *given), moved, partial(grouped.decode_, *given))


def of_norm(name: str, place: Place) -> Subject:
    """Return the backward pass of batch norm from codes; exact is torch's, of an input that is there."""
    # four rows are a channel, which has a multiple of four elements
    x, grad = (place.normal(seed).view(1, -1, 4 * place.columns) for seed in (1, 2))
    seed, sizes = torch.tensor(1, device=place.device), (place.bits, GROUP_SIZE)
    weight = torch.ones(x.shape[1], device=place.device)
    _, mean, invstd = torch.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
    codes = groupquant.encode(x.view(-1), *sizes, seed)
    given = grad, *codes, *sizes, mean.float(), invstd.float(), weight
    backward = torch.ops.aten.native_batch_norm_backward.default
    exact = partial(backward, grad, x, weight, None, None, mean, invstd, True, 1e-5, [True, True, True])
    moved = 3 * place.bytes + 2 * groupquant.packed_bytes(place.count, *sizes)
    return Subject(lambda: batchnorm.backward(*given), moved, lambda: norm.backward(*given), exact)


def of_smaq(name: str, place: Place) -> Subject:
    """Return coding or decoding in SmaQ blocks."""
    x, seed, moved = place.normal(1), torch.tensor(1, device=place.device), place.bytes + SMAQ.packed_bytes(place.count)
    if name == "smaq_encode":
        return Subject(lambda: smaq.encode(x, seed), moved, lambda: smaq_reference.encode(x, seed, True, *SMAQ))
    packed, count, dtype = smaq.encode(x, seed), place.count, place.dtype
    reference = partial(smaq_reference.decode, packed, 0, count, dtype, *SMAQ)
    return Subject(lambda: smaq.decode(packed, count, dtype), moved, reference)


def of_optimizer(name: str, place: Place) -> Subject:
    """Return the step of an optimizer whose state is SmaQ blocks."""
    param, grad, size = place.normal(1), place.normal(2), SMAQ.packed_bytes(place.count)
    states = 2 if name == "smaqstep_adam" else 1
    made = [torch.zeros(states, size, dtype=torch.uint8, device=place.device) for _ in range(2)]
    if name == "smaqstep_adam":
        rule = adam_rule(10, lr=1e-3, decoupled=True, maximize=False, **OPTIONS)
        ours, reference = smaqstep.adam_, smaqstep.reference_adam_
    else:
        rule = sgd_rule(10, lr=1e-3, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)
        ours, reference = smaqstep.sgd_, smaqstep.reference_sgd_
    calls = [
        partial(step, param.clone(), grad, *state, 1, rule, SMAQ)
        for step, state in zip((ours, reference), made, strict=True)
    ]
    return Subject(calls[0], 3 * place.bytes + 2 * states * size, calls[1])


def of_sketch(name: str, place: Place) -> Subject:
    """Return the making of a random matrix, or of the halves of one that it is multiplied with."""
    if name == "sketch_halves":
        x = place.normal(1).float()
        return Subject(lambda: halves.sketch_halves(x, 0.5), 8 * place.count, lambda: halves.reference(x, 0.5))
    seed = torch.tensor(1, device=place.device)
    given = seed, 0, place.rows, place.columns, name.removeprefix("sketch_"), place.dtype
    exact = partial(torch.randn, place.rows, place.columns, dtype=place.dtype, device=place.device)
    return Subject(lambda: sketch.sketch_columns(*given), place.bytes, lambda: sketch.reference(*given), exact)


MAKERS: dict[str, Callable[[str, Place], Subject]] = {
    "layer": lambda name, place: layer({"gelu": nn.GELU(), "silu": nn.SiLU(), "relu": nn.ReLU()}[name[6:]], place),
    "activate": of_steps,
    "stepwise": of_steps,
    "mask": of_mask,
    "bitpack": of_codes,
    "groupquant": of_groups,
    "batchnorm": of_norm,
    "smaq": of_smaq,
    "smaqstep": of_optimizer,
    "sketch": of_sketch,
}


def interleaved(calls: Sequence[Call], between: Call, rounds: int, seconds: float, cuda: bool) -> list[list[float]]:
    """Return the seconds of each run of each call: at least ``rounds`` runs, and more until ``seconds`` have passed."""
    for _ in range(WARM_UP_ROUNDS):
        for call in calls:
            call()
    timed = timed_cuda if cuda else timed_cpu
    found: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(found[0]) < rounds or time.perf_counter() < end:
        order = range(len(calls)) if len(found[0]) % 2 else reversed(range(len(calls)))
        for place in order:
            between()
            found[place].append(timed(calls[place]))
    return found


def timed_cpu(call: Call) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


_AHEAD_CYCLES = 4_000_000
"""Of the device, some two milliseconds: longer than the host takes to launch a forward and a backward pass."""


def timed_cuda(call: Call) -> float:
    """Return the seconds between two events around a call, all launched while the device still waits.

    So they are the device's own, as in a step, in which the host is ahead; else a launch would count as well.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def measured(name: str, dtype: str, bits: int, rows: int, columns: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the row of an operator, with the seconds of each run of it and of what it is compared with."""
    family = next(family for family, names in FAMILIES.items() if name in names)
    device = torch.device(asked.device)
    if device.type == "cpu":
        settle_heap()
    place = Place(rows, columns, getattr(torch, dtype), device, bits)
    subject = MAKERS[family](name, place)
    source, target, other, another = torch.zeros(4, rows, columns, dtype=place.dtype, device=device)
    calls: dict[str, Call | None] = {"seconds": subject.call, "copy_seconds": lambda: target.copy_(source)}
    calls["exact_seconds"] = subject.exact
    calls["reference_seconds"] = subject.reference if asked.reference else None
    notes = []
    if asked.compile and subject.compilable is not None:
        exact, step = subject.compilable
        compiled = step(torch.compile(exact))
        try:
            compiled()
            calls["compiled_seconds"] = compiled
        except Exception as error:  # a compiler may raise anything on a machine where it does not work
            notes.append(f"torch.compile does not work here: {first_line(error)[:200]}")
    present = {key: call for key, call in calls.items() if call is not None}
    between = partial(another.copy_, other)
    runs = interleaved(list(present.values()), between, asked.rounds, asked.seconds, device.type == "cuda")
    about = {"operator": name, "family": family, "dtype": dtype, "bits": None if name in ONE_WIDTH else bits}
    moved = {"moved_bytes": subject.moved_bytes, "copied_bytes": 2 * place.bytes}
    return {**about, "size": f"{rows}x{columns}", **moved, **dict(zip(present, runs, strict=True)), "notes": notes}


def rows_of(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure what was asked for; what cannot be measured, such as a kernel that is not compiled, is a row too."""
    for name, (rows, columns) in product(asked.operator, asked.size):
        for dtype in ["uint8"] if name in FAMILIES["bitpack"] else asked.dtype:
            for bits in asked.bits[:1] if name in ONE_WIDTH else asked.bits:
                print(f"{name} {dtype} {rows}x{columns}", file=sys.stderr, flush=True)
                try:
                    yield measured(name, dtype, bits, rows, columns, asked)
                except Exception as error:
                    yield {"operator": name, "dtype": dtype, "size": f"{rows}x{columns}", "notes": [first_line(error)]}
                gc.collect()


def spread(runs: Sequence[float]) -> str:
    """Return the median with the interquartile range."""
    first, _, third = quantiles(runs, n=4)
    return f"{format_seconds(median(runs))} ± {format_seconds(third - first)}"


def over(row: dict[str, Any], above: str, below: str) -> str:
    """Return the ratio of the medians of two series of runs, or nothing without one of them."""
    return f"{median(row[above]) / median(row[below]):.2f}x" if above in row and below in row else ""


def markdown(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table, of whose columns those with a ``:`` behind their name are aligned to the right."""
    names = head.split("|")
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    lines = [[name.removesuffix(":") for name in names], rule, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def operators_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of all operators that were measured, and notes on what could not be."""
    lines = []
    for row in rows:
        if "seconds" in row:
            rate = row["moved_bytes"] / median(row["seconds"])
            share = rate * median(row["copy_seconds"]) / row["copied_bytes"]
            about = [row["operator"], row["dtype"], str(row["bits"] or ""), row["size"], spread(row["seconds"])]
            exact, compiled = (over(row, "seconds", f"{other}_seconds") for other in ("exact", "compiled"))
            lines.append([*about, f"{rate / 1e9:.3g}", f"{100 * share:.0f} %", exact, compiled])
    text = markdown("Operator|Type|Bits:|Size|Time:|GB/s:|Of copy:|Over exact:|Over compiled:", lines)
    notes = [f"- {row['operator']} {row['dtype']} {row['size']}: {note}\n" for row in rows for note in row["notes"]]
    return text + ("\n" + "".join(notes) if notes else "")


def families_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of families beside the reference, the medians and minima of their operators added up."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "reference_seconds" in row:
            found.setdefault((row["family"], row["dtype"], f"{row['bits'] or ''}|{row['size']}"), []).append(row)
    lines = []
    for (family, dtype, place), group in found.items():
        ours, theirs = ([row[f"{which}seconds"] for row in group] for which in ("", "reference_"))
        times = [(sum(map(of, ours)), sum(map(of, theirs))) for of in (median, min)]
        ratios = [f"{slow / fast:.2f}x" for fast, slow in times]
        apart = ", ".join(over(row, "reference_seconds", "seconds") for row in group)
        lines.append([family, dtype, *place.split("|"), *map(format_seconds, times[0]), *ratios, apart])
    head = "Family|Type|Bits:|Size|Kernels:|Reference:|Faster by medians:|By minima:|Each operator:"
    return markdown(head, lines) if lines else ""


def size(text: str) -> tuple[int, int]:
    """Read rows and columns, such as ``512x3072``."""
    found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give rows and columns, such as 512x3072")
    return int(found[1]), int(found[2])


def main() -> int:
    """Measure and print; return 1 if an operator failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, help="default: cuda with a GPU, otherwise cpu")
    names = [*FAMILIES, *OPERATORS]
    parser.add_argument("--operator", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--size", nargs="+", type=size, metavar="RxC", help="rows and columns, such as 512x3072")
    parser.add_argument("--dtype", nargs="+", choices=FLOATS, help="default: float32, and bfloat16 on cuda")
    parser.add_argument("--bits", nargs="+", type=int, choices=range(1, 9), default=[3], help="default 3")
    parser.add_argument("--rounds", type=int, default=5, help="the least rounds of each row (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="the least seconds of each row (default 1)")
    parser.add_argument("--reference", action="store_true", help="also the reference in plain torch")
    parser.add_argument("--compile", action="store_true", help="also the exact layers under torch.compile")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write kernels/MACHINE.md and .json in it")
    asked = parser.parse_args()
    asked.device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    asked.operator = [name for each in asked.operator or FAMILIES for name in FAMILIES.get(each, (each,))]
    asked.size = asked.size or SIZES[asked.device]
    asked.dtype = asked.dtype or (["float32", "bfloat16"] if asked.device == "cuda" else ["float32"])
    name = torch.cuda.get_device_name() if asked.device == "cuda" else machine().processor
    about = f"{machine().name}: {name}, {torch.get_num_threads()} threads, torch {torch.__version__}.\n"
    origin = {"command": shlex.join(sys.argv), "machine": machine(), "versions": versions(), "recorded_at": now()}
    rows: list[dict[str, Any]] = []
    for row in rows_of(asked):
        rows.append(row)
        text = "\n".join(filter(None, (operators_table(rows), families_table(rows), about)))
        if asked.output is not None:  # after each row, since `make gpu` may stop it
            folder = asked.output / "kernels"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{machine().name}.kernels.md").write_text(text)
            (folder / f"{machine().name}.kernels.json").write_bytes(to_json({**origin, "rows": rows}, indent=1))
    print(text)
    return int(any("seconds" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
