"""What a warp issues for an element in each CUDA kernel, counted without a GPU, and what share of a copy that allows.

The machine code of one warp runs on the CPU (:mod:`machinecode`), first on 2,048 elements, then on these and 16,384
more. Only what the latter take counts: what comes before the loop drops out, and a search begins where the one before
has ended. The estimate is of an H200::

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
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from machinecode.launch import ALL_WARPS, Machine
from machinecode.program import Instruction
from torch import Tensor

from actbench.methods.actnn.ops import batchnorm, groupquant
from actbench.methods.actnn.ops.batchnorm import reference as norm
from actbench.methods.actnn.ops.groupquant import reference as grouped
from actbench.methods.fewbit.ops import activate, mask, stepwise
from actbench.methods.fewbit.tables import table
from actbench.methods.formats.ops import smaq, smaqstep
from actbench.methods.formats.ops.smaq import reference as smaq_reference
from actbench.methods.formats.ops.smaq.format import SMAQ
from actbench.methods.formats.ops.smaqstep.rules import adam_rule, sgd_rule
from actbench.methods.randomized.ops import halves, matrix
from actbench.ops import bitpack, rawkernel

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


def of_encoding(x: Tensor) -> Case:
    """Return the case of the step that each element is on."""
    return case(stepwise.encode, stepwise.launch_encode, stepwise.encode_reference, x, steps()[0], BITS, False)


def of_decoding(x: Tensor) -> Case:
    """Return the case of gradients times levels."""
    bounds, levels = steps()
    codes = stepwise.encode_reference(x, bounds, BITS, False)
    return case(stepwise.decode, stepwise.launch_decode, stepwise.decode_reference, codes, levels, x, BITS)


def of_activation(name: str) -> Callable[[Tensor], Case]:
    """Return the cases of an activation and its codes."""
    return lambda x: case(activate.activate, activate.launch, activate.reference, x, name, steps()[0], BITS, False)


def of_relu(x: Tensor) -> Case:
    """Return the case of ReLU and its mask."""
    return case(mask.relu, mask.launch_relu, mask.relu_reference, x)


def of_selection(x: Tensor) -> Case:
    """Return the case of ReLU's gradient."""
    return case(mask.select, mask.launch_select, mask.select_reference, bytes_like(x[::8], 256), x)


def of_packing(x: Tensor) -> Case:
    """Return the case of codes that are packed."""
    return case(bitpack.pack_codes, bitpack.launch_pack, bitpack.pack, bytes_like(x, 2**BITS), BITS)


def of_unpacking(x: Tensor) -> Case:
    """Return the case of codes that are read."""
    given = bitpack.pack(bytes_like(x, 2**BITS), BITS), BITS, x.numel()
    return case(bitpack.unpack_codes, bitpack.launch_unpack, lambda *each: bitpack.unpack(*each).byte(), *given)


def of_groups(x: Tensor) -> Case:
    """Return the case of groups that are encoded."""
    given = x, BITS, GROUP, torch.tensor(1), True
    return case(groupquant.encode, groupquant.launch_encode, grouped.encode, *given)


def of_coded_groups(x: Tensor) -> Case:
    """Return the case of groups that are decoded."""
    given = *grouped.encode(x, BITS, GROUP, torch.tensor(1), True), BITS, GROUP, 0, x.numel(), x.dtype
    return case(groupquant.decode, groupquant.launch_decode, grouped.decode, *given)


def of_norm(kernel: str) -> Callable[[Tensor], Case]:
    """Return the cases of batch norm's backward pass from codes: of its sums, or of the gradient by them."""

    def make(x: Tensor) -> Case:
        x = x.view(2, -1, 1024)
        mean, invstd, weight = torch.rand(3, x.shape[1])
        codes, words = grouped.encode(x.view(-1), BITS, GROUP, torch.tensor(1), True)
        dy = x.flip(2).contiguous()
        dx, _, _, sums = norm.backward(dy, codes, words, BITS, GROUP, mean, invstd, weight)
        start = batchnorm.launches(x.shape, x.dtype, BITS, GROUP)
        found = torch.empty_like(sums if kernel == "sums" else dx)

        def run() -> Results:
            if kernel == "sums":
                start.sums(dy, codes, words, mean, found)
                return (found[:, 1],)  # of the first sample, means over the batch replace them
            start.gradient(dy, codes, words, mean, invstd, weight, sums, found)
            return (found,)

        return Case(run, lambda: (sums[:, 1] if kernel == "sums" else dx,))

    return make


def of_smaq(x: Tensor) -> Case:
    """Return the case of SmaQ blocks that are encoded."""
    return case(smaq._encode, smaq.launch_encode, smaq_reference.encode, x, torch.tensor(1), True, *SMAQ)


def of_coded_smaq(x: Tensor) -> Case:
    """Return the case of SmaQ blocks that are decoded."""
    given = smaq_reference.encode(x, torch.tensor(1), True, *SMAQ), 0, x.numel(), x.dtype, *SMAQ
    return case(smaq._decode, smaq.launch_decode, smaq_reference.decode, *given)


def of_step(name: str) -> Callable[[Tensor], Case]:
    """Return the cases of an optimizer's step whose state is SmaQ blocks, in the fifth step or so."""
    common = {"lr": 1e-3, "weight_decay": 0.0, "maximize": False}
    if name == "adam":
        rule = adam_rule(5, betas=(0.9, 0.999), eps=1e-8, decoupled=True, **common)
        launch, reference, states = smaqstep.launch_adam, smaqstep.reference_adam_, 2
    else:
        rule = sgd_rule(5, momentum=0.9, dampening=0.0, nesterov=False, **common)
        launch, reference, states = smaqstep.launch_sgd, smaqstep.reference_sgd_, 1

    def make(x: Tensor) -> Case:
        noise = smaqstep._seeds(1) if name == "adam" else smaqstep._seeds(1)[0]
        moments = (x / 10, x.square() / 100)[:states]
        packed = [smaq_reference.encode(moment, torch.tensor(1), True, *SMAQ) for moment in moments]
        given = [[x.clone(), *(state.clone() for state in packed)] for _ in range(2)]

        def run(step: Callable[..., object], tensors: list[Tensor], *rest: object) -> Results:
            step(tensors[0], x.view(-1, 2).flip(1).flatten(), *tensors[1:], *rest)
            return tuple(tensors)

        return Case(lambda: run(launch, given[0], SMAQ, noise, rule), lambda: run(reference, given[1], 1, rule, SMAQ))

    return make


def of_sketch(kind: str) -> Callable[[Tensor], Case]:
    """Return the cases of a random matrix."""

    def make(x: Tensor) -> Case:
        seed, form = torch.tensor(1), (0, 1, x.numel(), kind, x.dtype, 1)
        run = matrix.launching_maker(*form, x.device)
        return Case(lambda: (run(seed),), lambda: (matrix.reference(seed, *form),))

    return make


def of_halves(x: Tensor) -> Case:
    """Return the case of floats that are split into pairs of bfloat16 numbers."""
    given = x.view(8, -1), 0.3
    return Case(lambda: (halves.launch(*given),), lambda: (halves.reference(*given),))


def bytes_like(x: Tensor, most: int) -> Tensor:
    """Return as many random bytes, each below a bound."""
    return torch.randint(most, (x.numel(),), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def most(float32: float, halves: float) -> dict[str, float]:
    """Return the budgets of a kernel."""
    return {"float32": float32, "bfloat16": halves, "float16": halves}


BYTES = ("uint8",)
SUBJECTS: dict[str, Subject] = {
    "stepwise_encode": Subject(of_encoding, most(20, 14)),
    "stepwise_decode": Subject(of_decoding, most(15, 16)),
    "activate_gelu": Subject(of_activation("gelu"), most(49, 45), measured="stepwise_activate"),
    "activate_silu": Subject(of_activation("silu"), most(43, 40)),
    "relu_mask": Subject(of_relu, most(12, 11)),
    "mask_select": Subject(of_selection, most(12, 9)),
    "pack_codes": Subject(of_packing, {"uint8": 11}, BYTES),
    "unpack_codes": Subject(of_unpacking, {"uint8": 12}, BYTES),
    "groupquant_encode": Subject(of_groups, most(13.5, 13.5)),
    "groupquant_decode": Subject(of_coded_groups, most(8, 8)),
    "batchnorm_sums": Subject(of_norm("sums"), most(29, 24)),
    "batchnorm_gradient": Subject(of_norm("gradient"), most(30, 26)),
    "smaq_encode": Subject(of_smaq, most(45, 40)),
    "smaq_decode": Subject(of_coded_smaq, {"float32": 20, "bfloat16": 20, "float16": 28}),
    "smaqstep_adam": Subject(of_step("adam"), most(160, 160)),
    "smaqstep_sgd": Subject(of_step("sgd"), most(90, 90)),
    "sketch_rademacher": Subject(of_sketch("rademacher"), most(14.5, 14.5)),
    "sketch_gaussian": Subject(of_sketch("gaussian"), most(20.5, 20.5)),
    "sketch_halves": Subject(of_halves, {"float32": 11}, ("float32",)),
}
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
    stored: float
    registers: int
    stack: int


PIPES = {
    "fma": ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"),
    "imad": ("IMAD",),
    "xu": ("MUFU", "POPC", "FLO", "BREV", "FCHK", "S2R", "REDUX"),
    "convert": ("F2I", "I2F", "I2FP", "F2F"),
    "lsu": ("LDG", "STG", "LDS", "STS", "ATOMS", "SHFL", "LDL", "STL"),
    "flow": ("BRA", "BSSY", "BSYNC", "BREAK", "EXIT", "CALL", "RET", "WARPSYNC", "BAR", "NOP", "LDC"),
}
"""Instructions by the unit that executes them; all others are the ALU's."""


def pipe_of(instruction: Instruction) -> str:
    """Return the unit of an instruction."""
    if instruction.uniform:
        return "uniform"
    return next((pipe for pipe, names in PIPES.items() if instruction.name in names), "alu")


FEW, MANY = 16_384, 147_456
"""Elements of a block. One of its eight warps has 2 and 18 pieces of 1,024 elements, or 8 and 72 tiles of 256."""


def run(
    subject: Subject, dtype: str, architecture: int, count: int, warps: Any = ALL_WARPS
) -> tuple[Machine, Case, Results]:
    """Run a kernel on normal numbers, the first of which are the same for all counts."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(DTYPES.get(dtype, torch.float32))
    made, machine = subject.case(x), Machine(architecture, warps)
    with patch.object(rawkernel, "launch", machine.launch):
        return machine, made, made.ours()


def counted(name: str, dtype: str, architecture: int) -> Count:
    """Count what one warp issues for the many elements and not for the few."""
    issued, pipes, turns, moved, sectors = Counter[int](), Counter[str](), 0, 0, 0
    for elements, sign in ((MANY, 1), (FEW, -1)):
        machine, *_ = run(SUBJECTS[name], dtype, architecture, elements, warps=(0,))
        assert machine.ran is not None
        kernel, block = machine.ran
        for instruction in kernel.instructions:
            times = sign * block.issued[instruction.address]
            issued[0] += times
            pipes[pipe_of(instruction)] += times
            turns += times * (instruction.name in ("SHFL", "LDL", "STL"))
        turns += sign * (block.memory.turns + block.shared.turns)
        moved += sign * machine.moved
        sectors += sign * block.memory.sectors
    lanes = (MANY - FEW) / 256  # the elements of one lane more
    per = {pipe: times / lanes for pipe, times in pipes.items()}
    return Count(
        name,
        dtype,
        architecture,
        issued[0] / lanes,
        per,
        turns / lanes,
        moved / (MANY - FEW),
        32 * sectors / (32 * lanes),
        kernel.registers,
        kernel.stack,
    )


# ---- The estimate. Clocks of one of a processor's four schedulers for an instruction; memory moves what a copy does.
# The two last numbers were fitted to 28 rows that were measured on an H200: 23 are within 15 %.

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
    # a sector of 32 bytes that two stores write by halves is written twice
    bytes_of = {"memory": count.moved, "stores": count.stored}
    return {k: v / COPIED_PER_PICOSECOND for k, v in bytes_of.items()} | {
        k: v / ISSUED_PER_PICOSECOND for k, v in clocks.items()
    }


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


PIPE_COLUMNS = {"ALU": "alu", "FMA": "fma", "IMAD": "imad", "XU": "xu"}
LEFT = ("Kernel", "Type", "Bound by")


def row_of(count: Count, measured: float | None) -> dict[str, str]:
    """Return a row of the table; what is of an H200 stands beside sm_90 alone."""
    subject, busy = SUBJECTS[count.kernel], picoseconds(count)
    budget = subject.budgets.get(count.dtype)
    row = {"Kernel": count.kernel, "Type": count.dtype, "sm": str(count.architecture)}
    row |= {"Instructions ↓": f"{count.issued:.1f}", "Budget": f"{budget:g}" if budget else ""}
    row |= {column: f"{count.pipes.get(pipe, 0):.1f}" for column, pipe in PIPE_COLUMNS.items()}
    row |= {"LSU turns": f"{count.turns:.1f}", "Registers": str(count.registers), "Stack": str(count.stack)}
    row |= {
        "Bytes": f"{count.moved:.2f}",
        "Stores": f"{count.stored:.2f}",
        "Bound by": max(busy, key=lambda unit: busy[unit]),
    }
    row |= {"Estimate ↑": f"{share_of_copy(count):.0%}", "Measured ↑": f"{measured:.0%}" if measured else ""}
    on_h200 = ("Budget", "Bound by", "Estimate ↑", "Measured ↑")
    return row if count.architecture == 90 else row | dict.fromkeys(on_h200, "")


def lines(kernels: list[str], architectures: list[int]) -> Iterator[str]:
    """Give the table, line by line."""
    measured, headed = measurements(), False
    for name in kernels:
        for dtype, architecture in product(SUBJECTS[name].dtypes, architectures):
            known = measured.get((SUBJECTS[name].measured or name, dtype))
            row = row_of(counted(name, dtype, architecture), known)
            if not headed:
                yield f"| {' | '.join(row)} |"
                yield f"| {' | '.join('---' if column in LEFT else '---:' for column in row)} |"
                headed = True
            yield f"| {' | '.join(row.values())} |"


NOTES = f"""
Instructions that a warp issues for an element of each of its lanes; of these the ALU's, the FMA unit's, and so on.
{BITS} bits, groups of {GROUP}, SmaQ's default format, normal numbers; NVRTC of torch {torch.__version__}.
Estimate: what share of a copy's bandwidth an H200 reaches, from how busy each unit is. Measured: on an H200
(`results/gpu/kernels`) with the kernels of that day, so that a kernel that issues fewer instructions today has an older
share beside it. What SmaQ issues depends on the numbers: with other normal ones an encoder took 1 less to 3 more.
"""


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--architecture", nargs="+", type=int, choices=(80, 90, 120), default=[90])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    written = []
    for line in lines(asked.kernel, asked.architecture):
        print(line, flush=True)
        written.append(line)
    if asked.output:
        asked.output.write_text("\n".join(["# Instructions of the CUDA kernels", "", *written, NOTES]))


if __name__ == "__main__":
    main()
