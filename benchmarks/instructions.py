"""What a warp issues for an element in each CUDA kernel, counted without a GPU, and what share of a copy that allows.

The machine code of one warp runs on the CPU (:mod:`machinecode`): first one tile of 256 elements, then four, so that what
comes before the loop drops out. The estimate is of an H200::

    .venv/bin/python benchmarks/instructions.py                                   # a table on standard output
    .venv/bin/python benchmarks/instructions.py --kernel stepwise_encode --architecture 80 90 120
    .venv/bin/python benchmarks/instructions.py --architecture 80 90 120 --output results/kernels/instructions.md
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant import reference as grouped
from actbench.methods.fewbit.ops import activate, mask, stepwise
from actbench.methods.fewbit.tables import table
from actbench.methods.formats.ops import smaq
from actbench.methods.formats.ops.smaq import reference as smaq_reference
from actbench.methods.formats.ops.smaq.format import SMAQ
from actbench.methods.randomized.ops import matrix
from actbench.ops import bitpack, rawkernel
from machinecode.launch import ALL_WARPS, Machine
from machinecode.program import Instruction

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS, GROUP = 3, 256
MEASURED = Path(__file__).parents[1] / "results" / "gpu" / "kernels" / "nvidia-h200-16c.kernels.json"
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A launch on tensors of the CPU, and what it should give.

    Attributes:
        ours: Launches the kernel, and returns what it wrote.
        reference: Computes the same in plain torch.
    """

    ours: Callable[[], Results]
    reference: Callable[[], Results]


@dataclass(frozen=True)
class Subject:
    """A kernel of the table.

    Attributes:
        case: Makes a case from the input.
        budgets: The most instructions for an element on sm_90, by type.
        dtypes: The types that it is counted for.
        measured: The operator's name in the measurements.
    """

    case: Callable[[Tensor], Case]
    budgets: Mapping[str, float] = field(default_factory=dict)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    measured: str = ""


def case(operator: Any, launch: Callable[..., object], reference: Callable[..., Any], *arguments: object) -> Case:
    """Return the case of an operator, its launch with results first, and its reference."""
    tupled = lambda made: made if isinstance(made, tuple) else (made,)  # noqa: E731
    made = tupled(operator.__wrapped__(*arguments))

    def ours() -> Results:
        launch(*made, *arguments)
        return made

    return Case(ours, lambda: tupled(reference(*arguments)))


def steps() -> tuple[Tensor, Tensor]:
    """Return the bounds and levels of GELU."""
    found = table("gelu", BITS)
    return torch.tensor(found.borders), torch.tensor(found.levels)


def of_activation(name: str) -> Callable[[Tensor], Case]:
    """Return the cases of an activation."""
    return lambda x: case(activate.activate, activate.launch, activate.reference, x, name, steps()[0], BITS, False)


def of_decoding(x: Tensor) -> Case:
    """Return the case of gradients times levels."""
    bounds, levels = steps()
    codes = stepwise.encode_reference(x, bounds, BITS, False)
    return case(stepwise.decode, stepwise.launch_decode, stepwise.decode_reference, codes, levels, x, BITS)


def of_sketch(kind: str) -> Callable[[Tensor], Case]:
    """Return the cases of a random matrix."""
    given = lambda x: (torch.tensor(1), 0, 1, x.numel(), kind, x.dtype, x.device)  # noqa: E731
    return lambda x: Case(lambda: (matrix.launch(*given(x)),), lambda: (matrix.reference(*given(x)),))


def bytes_like(x: Tensor, most: int) -> Tensor:
    """Return as many codes."""
    return torch.randint(most, (x.numel(),), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def of_groups(x: Tensor) -> Case:
    """Return the case of groups that are decoded."""
    coded = grouped.encode(x, BITS, GROUP, torch.tensor(1), True)
    given = *coded, BITS, GROUP, 0, x.numel(), x.dtype
    return case(groupquant.decode, groupquant.launch_decode, grouped.decode, *given)


SUBJECTS: dict[str, Subject] = {
    "stepwise_encode": Subject(lambda x: case(stepwise.encode, stepwise.launch_encode, stepwise.encode_reference, x, steps()[0], BITS, False), {"float32": 20, "bfloat16": 14, "float16": 14}),
    "stepwise_decode": Subject(of_decoding, {"float32": 15, "bfloat16": 16, "float16": 16}),
    "activate_gelu": Subject(of_activation("gelu"), {"float32": 49, "bfloat16": 45, "float16": 45}, measured="stepwise_activate"),
    "activate_silu": Subject(of_activation("silu"), {"float32": 43, "bfloat16": 40, "float16": 40}),
    "relu_mask": Subject(lambda x: case(mask.relu, mask.launch_relu, mask.relu_reference, x), {"float32": 12, "bfloat16": 11, "float16": 11}),
    "mask_select": Subject(lambda x: case(mask.select, mask.launch_select, mask.select_reference, bytes_like(x[::8], 256), x), {"float32": 12, "bfloat16": 9, "float16": 9}),
    "pack_codes": Subject(lambda x: case(bitpack.pack_codes, bitpack.launch_pack, bitpack.pack, bytes_like(x, 8), BITS), {"uint8": 11}, ("uint8",)),
    "unpack_codes": Subject(lambda x: case(bitpack.unpack_codes, bitpack.launch_unpack, lambda *a: bitpack.unpack(*a).byte(), bitpack.pack(bytes_like(x, 8), BITS), BITS, x.numel()), {"uint8": 12}, ("uint8",)),
    "groupquant_encode": Subject(lambda x: case(groupquant.encode, groupquant.launch_encode, grouped.encode, x, BITS, GROUP, torch.tensor(1), True)),
    "groupquant_decode": Subject(of_groups),
    "smaq_encode": Subject(lambda x: case(smaq._encode, smaq.launch_encode, smaq_reference.encode, x, torch.tensor(1), True, *SMAQ)),
    "smaq_decode": Subject(lambda x: case(smaq._decode, smaq.launch_decode, smaq_reference.decode, smaq_reference.encode(x, torch.tensor(1), True, *SMAQ), 0, x.numel(), x.dtype, *SMAQ)),
    "sketch_rademacher": Subject(of_sketch("rademacher"), {"float32": 13, "bfloat16": 13, "float16": 13}),
    "sketch_gaussian": Subject(of_sketch("gaussian"), {"float32": 18, "bfloat16": 18, "float16": 18}),
}  # fmt: skip
"""A kernel is one line: how a case is made of x, its budgets, and what is unlike the others."""


# ---- Counting


@dataclass(frozen=True)
class Count:
    """What one kernel issues and moves for an element, on one architecture."""

    kernel: str
    dtype: str
    architecture: int
    issued: float
    pipes: Mapping[str, float]
    turns: float
    moved: float
    registers: int
    stack: int


PIPES = {
    "fma": ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"),
    "imad": ("IMAD",),
    "xu": ("MUFU", "POPC", "FLO", "BREV", "FCHK", "S2R", "REDUX"),
    "convert": ("F2I", "I2F", "I2FP", "F2F"),
    "lsu": ("LDG", "STG", "LDS", "STS", "SHFL"),
    "flow": ("BRA", "BSSY", "BSYNC", "BREAK", "EXIT", "CALL", "RET", "WARPSYNC", "BAR", "NOP", "LDC"),
}
"""Instructions by the unit that executes them; all others are the ALU's."""


def pipe_of(instruction: Instruction) -> str:
    """Return the unit of an instruction."""
    if instruction.uniform:
        return "uniform"
    return next((pipe for pipe, names in PIPES.items() if instruction.name in names), "alu")


def run(
    subject: Subject, dtype: str, architecture: int, count: int, warps: Any = ALL_WARPS
) -> tuple[Machine, Case, Results]:
    """Run a kernel on normal numbers."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(DTYPES.get(dtype, torch.float32))
    made, machine = subject.case(x), Machine(architecture, warps)
    with patch.object(rawkernel, "launch", machine.launch):
        return machine, made, made.ours()


def counted(name: str, dtype: str, architecture: int) -> Count:
    """Count what one warp issues for four tiles and not for one."""
    issued, pipes, turns, moved = Counter[int](), Counter[str](), 0, 0
    for tiles, sign in ((4, 1), (1, -1)):
        machine, *_ = run(SUBJECTS[name], dtype, architecture, 2048 * tiles, warps=(0,))
        assert machine.ran is not None
        kernel, block = machine.ran
        for instruction in kernel.instructions:
            times = sign * block.issued[instruction.address]
            issued[0] += times
            pipes[pipe_of(instruction)] += times
            turns += times * (instruction.name == "SHFL")
        turns += sign * (block.memory.turns + block.shared.turns)
        moved += sign * machine.moved
    lanes = 3 * 8  # three tiles, of which a lane has eight elements each
    per = {pipe: times / lanes for pipe, times in pipes.items()}
    return Count(
        name,
        dtype,
        architecture,
        issued[0] / lanes,
        per,
        turns / lanes,
        moved / (3 * 2048),
        kernel.registers,
        kernel.stack,
    )


# ---- The estimate. Clocks of one of a processor's four schedulers for an instruction; memory moves what a copy does. The
# two last numbers were fitted to 28 rows that were measured on an H200: 23 are within 15 %.

COPIED_PER_PICOSECOND, ISSUED_PER_PICOSECOND = 4.2, 132 * 4 * 32 * 1.755e-3
CLOCKS = {"alu": 2, "xu": 8, "convert": 2}
SHARPNESS, REACHED = 8, 0.88


def picoseconds(count: Count) -> dict[str, float]:
    """Return how long each unit is busy for an element."""
    clocks = {pipe: count.pipes.get(pipe, 0) * cost for pipe, cost in CLOCKS.items()}
    products = 2 * count.pipes.get("imad", 0)  # one half of the unit multiplies integers
    clocks["fma"] = max(products, count.pipes.get("fma", 0) + products / 2)
    clocks["lsu"] = 4 * count.turns  # which the four schedulers share
    clocks["issue"] = count.issued
    return {"memory": count.moved / COPIED_PER_PICOSECOND} | {k: v / ISSUED_PER_PICOSECOND for k, v in clocks.items()}


def share_of_copy(count: Count) -> float:
    """Estimate what share of a copy's bandwidth a kernel reaches: no unit waits for the others, and none is alone."""
    busy = picoseconds(count)
    return REACHED * busy["memory"] / sum(t**SHARPNESS for t in busy.values()) ** (1 / SHARPNESS)


def measurements() -> dict[tuple[str, str], float]:
    """Return the measured shares of a copy by operator and type."""
    found = {}
    for row in json.loads(MEASURED.read_text())["rows"]:
        ours, copy = median(row["seconds"]), median(row["copy_seconds"])
        found[row["operator"], row["dtype"]] = row["moved_bytes"] / ours / (row["copied_bytes"] / copy)
    return found


def rows(kernels: list[str], architectures: list[int]) -> Iterator[str]:
    """Give a table, line by line."""
    yield "| Kernel | Type | sm | Instructions ↓ | Budget | ALU | FMA | IMAD | XU | LSU turns | Registers | Stack | Bytes | Bound by | Estimate ↑ | Measured ↑ |"
    yield "| --- | --- | ---: |" + " ---: |" * 10 + " --- | ---: | ---: |"
    measured = measurements()
    for name in kernels:
        for dtype in SUBJECTS[name].dtypes:
            for architecture in architectures:
                count, on_h200 = counted(name, dtype, architecture), architecture == 90
                pipes = [f"{count.pipes.get(pipe, 0):.1f}" for pipe in ("alu", "fma", "imad", "xu")]
                busy = picoseconds(count)
                known = measured.get((SUBJECTS[name].measured or name, dtype))
                budget = SUBJECTS[name].budgets.get(dtype)
                cells = [
                    name, dtype, str(architecture), f"{count.issued:.1f}", f"{budget:g}" if budget and on_h200 else "", *pipes, f"{count.turns:.1f}",
                    str(count.registers), str(count.stack), f"{count.moved:.2f}",
                    max(busy, key=lambda unit: busy[unit]) if on_h200 else "", f"{share_of_copy(count):.0%}" if on_h200 else "",
                    f"{known:.0%}" if known and on_h200 else "",
                ]  # fmt: skip
                yield f"| {' | '.join(cells)} |"


NOTES = f"""
Warp instructions that a warp issues for an element of each lane, which is the same number for 32 elements; of these the ALU's, the FMA
unit's, and so on. {BITS} bits; groups of {GROUP}; SmaQ's default format. Estimate: what share of a copy's bandwidth an H200 reaches, from the
busiest units alone. Measured: on an H200, `results/gpu/kernels`, with the kernels of that day, so that a kernel that issues fewer
instructions today has an older share beside it. Normal numbers; NVRTC of torch {torch.__version__}.
"""


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--architecture", nargs="+", type=int, choices=(80, 90, 120), default=[90])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    lines = []
    for line in rows(asked.kernel, asked.architecture):
        print(line, flush=True)
        lines.append(line)
    if asked.output:
        asked.output.write_text("\n".join(["# Instructions of the CUDA kernels", "", *lines]) + "\n" + NOTES)


if __name__ == "__main__":
    main()
